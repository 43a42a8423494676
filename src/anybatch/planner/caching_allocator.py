"""A model of CUDA's caching allocator: the memory it reserves on the device for the allocations of a trace.

A device runs out of *reserved* memory. The allocator rounds sizes, reserves segments and caches them, returns the
smallest free block that is large enough, splits off the rest, and never moves blocks, so memory fragments. If the
device is full, it frees segments without allocations and retries.

Source: PyTorch, c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of version 2.13, default settings.
Limits: new segments are assumed to have higher addresses than older segments. Not modelled: private pools of CUDA
graphs, and memory used by several streams, which becomes free only after the last stream has finished with it.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from anybatch.core.geometry import ceil_div
from anybatch.memory.trace import MemoryEnvelope

MEBIBYTE = 1 << 20

ROUNDING_BYTES = 512
"""kMinBlockSize: sizes are multiples of this."""
LARGEST_SMALL_BYTES = MEBIBYTE
"""kSmallSize: allocations up to this size use the small pool; the large pool splits off no smaller remainder."""
SMALL_SEGMENT_BYTES = 2 * MEBIBYTE
"""kSmallBuffer: segment size of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MEBIBYTE
"""kLargeBuffer, set by `large_segment_size_mb`: segment size for allocations below `MIN_SEPARATE_BYTES`."""
MIN_SEPARATE_BYTES = 10 * MEBIBYTE
"""kMinLargeAlloc: from this size on, an allocation without a free block gets a separate segment."""
SEGMENT_ROUNDING_BYTES = 2 * MEBIBYTE
"""kRoundLarge: the sizes of separate segments are multiples of this."""

_ENDLESS = 1 << 60


@dataclass(frozen=True, slots=True)
class AllocatorReplay:
    """Outcome of replaying a trace in the allocator."""

    peak_reserved_bytes: int  # largest amount reserved on the device, as `torch.cuda.max_memory_reserved`
    peak_allocated_bytes: int  # largest amount allocated, as `torch.cuda.max_memory_allocated`
    num_retries: int  # how often the allocator freed cached segments and retried, as `num_alloc_retries`
    full_at: int | None = None  # index of the event at which memory ran out and the replay ended; None if it fits

    @property
    def fits(self) -> bool:
        """Whether the whole trace fits."""
        return self.full_at is None


def replay(
    events: Sequence[int],
    sizes: Sequence[int],
    *,
    limit_bytes: int | None = None,
    expandable: bool = False,
    pools: Sequence[int] | None = None,
) -> AllocatorReplay:
    """Run the allocations and frees of a trace in the allocator; `sizes` are the bytes of each allocation."""
    allocator = _Allocator(limit_bytes=limit_bytes, expandable=expandable)
    full_at = None
    for position, event in enumerate(events):
        number = abs(event) - 1
        if sizes[number] <= 0:
            continue
        if event < 0:
            allocator.free(number)
        elif not allocator.allocate(number, sizes[number], 0 if pools is None else pools[number]):
            full_at = position
            break
    return AllocatorReplay(allocator.peak_reserved, allocator.peak_allocated, allocator.num_retries, full_at)


def largest_that_fits(envelope: MemoryEnvelope, limit_bytes: int, *, expandable: bool = False) -> int | None:
    """Return a large micro-batch size that fits in `limit_bytes` of reserved memory; 0: no size fits, None: all fit.

    The search starts from the size that tensors alone would allow, and bisects if the allocator needs more memory.
    Fragmentation is not monotonic in the size, so a larger size may fit; a replay has confirmed the returned size.
    """
    pools = envelope.trace.pools

    def fits(m: int) -> bool:
        sizes = envelope.sizes(m)
        return replay(envelope.trace.events, sizes, limit_bytes=limit_bytes, expandable=expandable, pools=pools).fits

    # Reserved memory is never less than allocated memory, so this is an upper bound.
    upper = envelope.largest(limit_bytes)
    if upper is None:
        return None if fits(1) else 0
    if upper == 0 or fits(upper):
        return upper
    low, high = 0, upper
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def rounded_bytes(num_bytes: int) -> int:
    """Return the block size for an allocation of `num_bytes`."""
    return ceil_div(max(num_bytes, 1), ROUNDING_BYTES) * ROUNDING_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Return the segment size to reserve if no free block is large enough."""
    if block_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MIN_SEPARATE_BYTES:
        return LARGE_SEGMENT_BYTES
    return ceil_div(block_bytes, SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


@dataclass(slots=True, eq=False)
class _Pool:
    """The small or the large blocks of one stream."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)  # (size, address), sorted
    blocks: dict[int, "_Block"] = field(default_factory=dict)  # blocks that are not allocated, by address
    unmapped: list[int] = field(default_factory=list)  # addresses of unmapped blocks, sorted; expandable segments only

    @property
    def page_bytes(self) -> int:
        return SMALL_SEGMENT_BYTES if self.is_small else LARGE_SEGMENT_BYTES


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, linked to its neighbours."""

    pool: _Pool
    address: int
    size: int
    is_allocated: bool = False
    is_mapped: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


class _Allocator:
    """The allocator's state. A block is allocated, or in its pool's `free`, or unmapped."""

    def __init__(self, *, limit_bytes: int | None, expandable: bool) -> None:
        self.peak_reserved = self.peak_allocated = self.num_retries = 0
        self._reserved = self._allocated = 0
        self._limit = _ENDLESS if limit_bytes is None else limit_bytes
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._allocated_blocks: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, number: int, num_bytes: int, stream: int) -> bool:
        """Allocate a block; return False if memory is full."""
        size = rounded_bytes(num_bytes)
        pool = self._pool(stream, is_small=size <= LARGEST_SMALL_BYTES)
        grow = self._expand if self._expandable else self._add_segment
        # The order of PyTorch's `malloc`: a cached block, a new segment, and a new segment after emptying the cache.
        block = self._best_fit(pool, size) or grow(pool, size)
        if block is None:
            self.num_retries += 1
            self._release_free_segments()
            block = grow(pool, size)
        if block is None:
            return False
        # A small remainder of a large block is not split off, since it would only fragment memory.
        rest = block.size - size
        if rest >= ROUNDING_BYTES if pool.is_small or self._expandable else rest > LARGEST_SMALL_BYTES:
            self._put(self._split(block, size))
        block.is_allocated = True
        self._allocated_blocks[number] = block
        self._allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self._allocated)
        return True

    def free(self, number: int) -> None:
        """Free a block, and merge it with free neighbours."""
        block = self._allocated_blocks.pop(number)
        self._allocated -= block.size
        block.is_allocated = False
        self._put(self._merged(block))

    def _pool(self, stream: int, *, is_small: bool) -> _Pool:
        # Streams share no blocks, and neither do small and large allocations.
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = _Pool(is_small)
            if self._expandable:
                # An expandable segment starts as a range of unmapped addresses.
                self._put(_Block(pool, 0, _ENDLESS, is_mapped=False))
        return pool

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Remove from the pool the smallest free block that is large enough, at the lowest address."""
        # With address -1, which no block has, this finds the first block of at least this size.
        at = bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        if self._expandable:
            # A block that can grow counts with its maximum size, so that it is used last.
            while at + 1 < len(pool.free) and self._room(pool, at + 1) < self._room(pool, at):
                at += 1
        return pool.blocks.pop(pool.free.pop(at)[1])

    @staticmethod
    def _room(pool: _Pool, at: int) -> int:
        size, address = pool.free[at]
        after = pool.blocks[address].after
        return size + (after.size if after is not None and not after.is_mapped else 0)

    def _add_segment(self, pool: _Pool, size: int) -> _Block | None:
        """Reserve a new segment on the device; None if its memory is full."""
        num_bytes = segment_bytes(size)
        if not self._reserve(num_bytes):
            return None
        block = _Block(pool, self._next_address, num_bytes)
        self._next_address += num_bytes
        return block

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest address with room; None if the device's memory is full."""
        # The address range is unlimited in this model, so some unmapped block always has room.
        block = next(start for address in pool.unmapped if (start := _room_around(pool.blocks[address], size)))
        if not block.is_mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.after is not None
            mapped = self._map(block.after, min(block.after.size, size - block.size))
            if mapped is None:
                return None
            block = mapped
        self._remove(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block | None:
        num_bytes = ceil_div(size, block.pool.page_bytes) * block.pool.page_bytes
        if not self._reserve(num_bytes):
            return None
        self._remove(block)
        if num_bytes < block.size:
            self._put(self._split(block, num_bytes))
        block.is_mapped = True
        block = self._merged(block)
        self._put(block)
        return block

    def _release_free_segments(self) -> None:
        """Return all free segments, and all free whole pages of expandable segments, to the device."""
        for pool in self._pools.values():
            # Iterate over a copy, since returning a block removes it from the list.
            for _, address in list(pool.free):
                block = pool.blocks[address]
                if self._expandable:
                    self._unmap(block)
                # Only a segment that is one free block can be returned.
                elif block.before is None and block.after is None:
                    self._remove(block)
                    self._reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        page = block.pool.page_bytes
        # Only whole pages are returned; pages shared with a neighbouring block stay mapped.
        start, stop = ceil_div(block.address, page) * page, (block.address + block.size) // page * page
        if start >= stop:
            return
        self._remove(block)
        if stop < block.address + block.size:
            self._put(self._split(block, stop - block.address))
        if start > block.address:
            pages = self._split(block, start - block.address)
            self._put(block)
            block = pages
        block.is_mapped = False
        self._reserved -= block.size
        self._put(self._merged(block))

    def _reserve(self, num_bytes: int) -> bool:
        if self._reserved + num_bytes > self._limit:
            return False
        self._reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self._reserved)
        return True

    @staticmethod
    def _split(block: _Block, size: int) -> _Block:
        """Shrink a block that is in no list to `size`; return the remainder, at a higher address."""
        rest = _Block(block.pool, block.address + size, block.size - size, is_mapped=block.is_mapped)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _merged(self, block: _Block) -> _Block:
        """Merge a block that is in no list with its neighbours in the same state."""
        for lower, upper in ((block.before, block), (block, block.after)):
            if lower is None or upper is None:
                continue
            other = lower if upper is block else upper
            if other.is_allocated or other.is_mapped != block.is_mapped:
                continue
            self._remove(other)
            block.address, block.size = lower.address, lower.size + upper.size
            block.before, block.after = lower.before, upper.after
            if block.before is not None:
                block.before.after = block
            if block.after is not None:
                block.after.before = block
        return block

    @staticmethod
    def _put(block: _Block) -> None:
        pool = block.pool
        pool.blocks[block.address] = block
        if block.is_mapped:
            insort(pool.free, (block.size, block.address))
        else:
            insort(pool.unmapped, block.address)

    @staticmethod
    def _remove(block: _Block) -> None:
        pool = block.pool
        del pool.blocks[block.address]
        if block.is_mapped:
            del pool.free[bisect_left(pool.free, (block.size, block.address))]
        else:
            del pool.unmapped[bisect_left(pool.unmapped, block.address)]


def _room_around(block: _Block, size: int) -> _Block | None:
    """Return the first block of the run of free blocks around `block` if the run has room for `size`; else None."""
    start = block
    if block.before is not None and not block.before.is_allocated:
        start = block.before
    room = 0
    piece: _Block | None = start
    while room < size and piece is not None and not piece.is_allocated:
        room += piece.size
        piece = piece.after
    return start if room >= size else None
