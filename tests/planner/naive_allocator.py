"""A slow, simple model of CUDA's caching allocator: memory is a list of runs, searched in full every time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20
FREE, UNMAPPED = "free", "unmapped"
ENDLESS = 1 << 60

Run = tuple[int, object]
"""(bytes, owner), where the owner is FREE, UNMAPPED or the number of an allocation."""


@dataclass
class Segment:
    """Contiguous memory of one stream, for small or for large allocations."""

    key: tuple[int, bool]
    runs: list[Run]

    def tidy(self) -> None:
        """Merge neighbouring runs that are both free or both unmapped."""
        tidied: list[Run] = []
        for size, owner in self.runs:
            if size and tidied and owner in {FREE, UNMAPPED} and tidied[-1][1] == owner:
                tidied[-1] = (tidied[-1][0] + size, owner)
            elif size:
                tidied.append((size, owner))
        self.runs = tidied


@dataclass
class Naive:
    """The device's memory. Segments are in the order of their creation, which is also the order of their addresses."""

    limit: int | None
    expandable: bool
    segments: list[Segment] = field(default_factory=list)
    retries: int = 0
    peak_reserved: int = 0
    peak_allocated: int = 0

    @property
    def reserved(self) -> int:
        """Return the bytes reserved from the device."""
        return sum(size for segment in self.segments for size, owner in segment.runs if owner != UNMAPPED)

    @property
    def allocated(self) -> int:
        """Return the allocated bytes."""
        return sum(size for segment in self.segments for size, owner in segment.runs if owner not in {UNMAPPED, FREE})

    def take(self, name: int, num_bytes: int, stream: int) -> bool:
        """Allocate memory; return False if there is not enough."""
        size = max(512, -(-num_bytes // 512) * 512)
        key = (stream, size <= MIB)
        found = self.best(key, size) or self.grow(key, size)
        if found is None:
            self.retries += 1
            self.hand_back()
            found = self.grow(key, size)
        if found is None:
            return False
        segment, at = found
        rest = segment.runs[at][0] - size
        if not (rest >= 512 if key[1] or self.expandable else rest > MIB):
            size, rest = size + rest, 0
        segment.runs[at : at + 1] = [(size, name), (rest, FREE)]
        segment.tidy()
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return True

    def let_go(self, name: int) -> None:
        """Free an allocation."""
        for segment in self.segments:
            segment.runs = [(size, FREE if owner == name else owner) for size, owner in segment.runs]
            segment.tidy()

    def best(self, key: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Return the smallest free run that is large enough; if expandable, one with little room to grow."""
        found = [
            (run[0], number, at)
            for number, segment in enumerate(self.segments)
            for at, run in enumerate(segment.runs)
            if segment.key == key and run[1] == FREE and run[0] >= size
        ]
        found.sort()
        if not found:
            return None
        best = 0
        while self.expandable and best + 1 < len(found) and self.room(found[best + 1]) < self.room(found[best]):
            best += 1
        return self.segments[found[best][1]], found[best][2]

    def room(self, where: tuple[int, int, int]) -> int:
        """Return the bytes of a run and of the unmapped run after it."""
        runs = self.segments[where[1]].runs
        grows = where[2] + 1 < len(runs) and runs[where[2] + 1][1] == UNMAPPED
        return where[0] + (runs[where[2] + 1][0] if grows else 0)

    def grow(self, key: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Reserve more memory from the device."""
        if self.expandable:
            return self.expand(key, size)
        wanted = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.limit is not None and self.reserved + wanted > self.limit:
            return None
        self.segments.append(Segment(key, [(wanted, FREE)]))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return self.segments[-1], 0

    def expand(self, key: tuple[int, bool], size: int) -> tuple[Segment, int] | None:
        """Map enough pages in the first stretch of unallocated runs that contains unmapped memory."""
        if all(segment.key != key for segment in self.segments):
            self.segments.append(Segment(key, [(ENDLESS, UNMAPPED)]))
        segment = next(segment for segment in self.segments if segment.key == key)
        page = 2 * MIB if key[1] else 20 * MIB
        for begin in self.beginnings(segment.runs, size):
            while segment.runs[begin][1] == UNMAPPED or segment.runs[begin][0] < size:
                at = begin if segment.runs[begin][1] == UNMAPPED else begin + 1
                missing = size - (0 if at == begin else segment.runs[begin][0])
                pages = -(-min(missing, segment.runs[at][0]) // page) * page
                if self.limit is not None and self.reserved + pages > self.limit:
                    return None
                segment.runs[at : at + 1] = [(pages, FREE), (segment.runs[at][0] - pages, UNMAPPED)]
                segment.tidy()
                self.peak_reserved = max(self.peak_reserved, self.reserved)
            return segment, begin
        raise AssertionError

    @staticmethod
    def beginnings(runs: Sequence[Run], size: int) -> list[int]:
        """Return the starts of stretches with enough room: an unmapped run, or the free run before it."""
        found = []
        for at, (_, owner) in enumerate(runs):
            if owner == UNMAPPED:
                begin = at - 1 if at and runs[at - 1][1] == FREE else at
                stretch = 0
                for length, other in runs[begin:]:
                    if other not in {FREE, UNMAPPED}:
                        break
                    stretch += length
                if stretch >= size:
                    found.append(begin)
        return found

    def hand_back(self) -> None:
        """Return unused segments, or unused pages, to the device."""
        if not self.expandable:
            self.segments = [one for one in self.segments if any(owner != FREE for _, owner in one.runs)]
            return
        for segment in self.segments:
            page = 2 * MIB if segment.key[1] else 20 * MIB
            position, runs = 0, list[Run]()
            for size, owner in segment.runs:
                first, last = -(-position // page) * page, (position + size) // page * page
                if owner == FREE and first < last:
                    runs += [(first - position, FREE), (last - first, UNMAPPED), (position + size - last, FREE)]
                else:
                    runs.append((size, owner))
                position += size
            segment.runs = runs
            segment.tidy()


def replay_naively(
    events: Sequence[int], sizes: Sequence[int], limit: int | None, streams: Sequence[int], *, expandable: bool
) -> tuple[int, int, int, int | None]:
    """Return the peaks of reserved and allocated memory, the retries, and the event that ran out of memory."""
    device = Naive(limit, expandable)
    for position, event in enumerate(events):
        if event < 0:
            device.let_go(-event - 1)
        elif not device.take(event - 1, sizes[event - 1], streams[event - 1]):
            return device.peak_reserved, device.peak_allocated, device.retries, position
    return device.peak_reserved, device.peak_allocated, device.retries, None
