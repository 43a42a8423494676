"""Curves of a run: its steps as points to draw, and a preview of a long log."""

import bisect
import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from anybatch.events.log_lines import JsonLine, decoded_line
from anybatch_guide.watch.fields import integer, number

MAX_STEPS: Final = 2**20
"""Above this number, every second step is dropped, so that memory stays within 49 MiB per run."""
MAX_BUCKETS: Final = 240
_DIGITS: Final = 7
_LARGEST: Final = 1e30
FARTHEST: Final = 2**42
"""Above this value, the ticks of an axis would be equal."""
CLIPPED, SKIPPED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The values of one step."""

    step: int  # its number
    samples: int  # samples of its effective batch
    seconds: float  # time since the start of the run, without pauses between resumes
    loss: float  # loss of the effective batch
    norm: float  # gradient norm before clipping; NaN if it was not computed
    rate: float  # learning rate of the first parameter group; NaN if unknown
    flags: int  # `CLIPPED`, `SKIPPED`, both or neither


@dataclass(slots=True)
class Curve:
    """The steps of a run, in order; a repeated step replaces it and all later steps."""

    stride: int = 1  # every stride-th step is kept; a power of two
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    samples: "array[int]" = field(default_factory=lambda: array("q"))
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    losses: "array[float]" = field(default_factory=lambda: array("d"))
    norms: "array[float]" = field(default_factory=lambda: array("d"))
    rates: "array[float]" = field(default_factory=lambda: array("d"))
    flags: "array[int]" = field(default_factory=lambda: array("b"))
    last: Step | None = None
    num_samples: int = 0
    num_clipped: int = 0
    num_skipped: int = 0

    def add(self, step: Step) -> None:
        """Add the next step."""
        if self.last is not None and step.step <= self.last.step:
            self.undo_from(step.step)
        self.last = step
        self.num_samples = min(self.num_samples + step.samples, 2**62)
        self.num_clipped += step.flags & CLIPPED
        self.num_skipped += step.flags >> 1
        if step.step % self.stride:
            return
        values = (step.step, self.num_samples, step.seconds, step.loss, step.norm, step.rate, step.flags)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        if len(self.steps) > MAX_STEPS:
            self._thin()

    def undo_from(self, first_step: int) -> None:
        """Drop a step and all later steps, because a resumed run repeats them."""
        if self.last is None or self.last.step < first_step:
            return
        at = bisect.bisect_left(self.steps, first_step)
        lost = self.flags[at:]
        self.num_clipped = max(0, self.num_clipped - sum(flags & CLIPPED for flags in lost))
        self.num_skipped = max(0, self.num_skipped - sum(flags >> 1 for flags in lost))
        for column in self._columns:
            del column[at:]
        self.num_samples = self.samples[-1] if self.samples else 0
        self.last = self._kept(-1) if self.steps else None

    def points(self) -> dict[str, Any]:
        """Return the curves: the smallest and the largest loss of at most `MAX_BUCKETS` sections, and other values.

        A value that is not finite is None, which leaves a gap.
        """
        size = max(1, -(-len(self.steps) // MAX_BUCKETS))
        places: list[int] = []
        pieces: list[list[float | int | None]] = []
        for begin in range(0, len(self.steps), size):
            end = min(begin + size, len(self.steps))
            places += self._extremes(begin, end)
            pieces.append([self._speed(begin, end), *self._others(begin, end)])
        speeds, norms, rates, clipped = map(list, zip(*pieces, strict=True)) if pieces else ([], [], [], [])
        lasts = [min(begin + size, len(self.steps)) - 1 for begin in range(0, len(self.steps), size)]
        return {
            "loss": self._along(places, [plain(self.losses[at]) for at in places]),
            "speed": self._along(lasts, speeds),
            "norm": self._along(lasts, norms),
            "rate": self._along(lasts, rates),
            "clipped": self._along(lasts, clipped),
        }

    @property
    def _columns(self) -> "tuple[array[Any], ...]":
        return self.steps, self.samples, self.seconds, self.losses, self.norms, self.rates, self.flags

    def _kept(self, at: int) -> Step:
        before = self.samples[at - 1] if len(self.steps) > 1 else 0
        return Step(
            step=self.steps[at],
            samples=self.samples[at] - before,
            seconds=self.seconds[at],
            loss=self.losses[at],
            norm=self.norms[at],
            rate=self.rates[at],
            flags=self.flags[at],
        )

    def _thin(self) -> None:
        self.stride *= 2
        kept = [at for at, step in enumerate(self.steps) if step % self.stride == 0]
        for column in self._columns:
            column[:] = array(column.typecode, [column[at] for at in kept])

    def _extremes(self, begin: int, end: int) -> list[int]:
        """Return the indices of the smallest and the largest loss of a section, in order; without losses, the first."""
        piece = self.losses[begin:end]
        finite = piece if math.isfinite(sum(piece)) else [value for value in piece if math.isfinite(value)]
        if not finite:
            return [begin]
        least, largest = piece.index(min(finite)), piece.index(max(finite))
        return [begin + at for at in sorted({least, largest})]

    def _others(self, begin: int, end: int) -> tuple[float | None, float | None, float]:
        norms = [value for value in self.norms[begin:end] if math.isfinite(value)]
        clipped = sum(flags & CLIPPED for flags in self.flags[begin:end]) / (end - begin)
        return (plain(max(norms)) if norms else None), plain(self.rates[end - 1]), round(clipped, 4)

    def _speed(self, begin: int, end: int) -> float | None:
        """Return samples per second of a section, from the end of the previous step."""
        before = max(0, begin - 1)
        seconds = self.seconds[end - 1] - self.seconds[before]
        return plain((self.samples[end - 1] - self.samples[before]) / seconds) if seconds > 0 else None

    def _along(self, places: Sequence[int], values: list[float | int | None]) -> dict[str, Any]:
        return {
            "step": [min(self.steps[at], FARTHEST) for at in places],
            "samples": [min(self.samples[at], FARTHEST) for at in places],
            "seconds": [round(self.seconds[at], 3) for at in places],
            "value": values,
        }


def plain(value: float) -> float | None:
    """Return a number rounded for a chart; None if it cannot be drawn."""
    if not abs(value) <= _LARGEST:
        return None
    return float(f"{value:.{_DIGITS}g}") if abs(value) >= 1 / _LARGEST else 0.0


MIN_BYTES: Final = 32 * 2**20
"""Shorter logs are read in about the same time."""
NUM_PLACES: Final = 200
_PLACE_BYTES: Final = 1 << 16
_STEP: Final = b'"kind":"step"'


def sketched(path: Path, size: int) -> dict[str, Any] | None:
    """Return about `NUM_PLACES` steps of a log as points of a curve; None without a usable preview.

    Samples are estimated: all steps are assumed to have the same number. Logs with repeated steps or a changed clock
    have no usable preview.
    """
    try:
        rows = list(_found(path, size))
    except OSError:
        return None
    steps = [step for step, *_ in rows]
    seconds = [at for *_, at in rows]
    is_in_order = all(a < b for a, b in itertools.pairwise(steps)) and seconds == sorted(seconds)
    if len(rows) < NUM_PLACES // 4 or not is_in_order:
        return None
    return {
        "step": [min(step, FARTHEST) for step in steps],
        "samples": [min((step + 1) * samples, FARTHEST) for step, samples, *_ in rows],
        "seconds": [round(min(at - seconds[0], 1e9), 3) for at in seconds],
        "value": [plain(loss) for _, _, loss, _ in rows],
    }


def _found(path: Path, size: int) -> Iterator[tuple[int, int, float, float]]:
    """Yield step, samples, loss and time of the first step after each position."""
    last = -1
    with path.open("rb") as file:
        for place in range(NUM_PLACES):
            file.seek(place * size // NUM_PLACES)
            line = _first_step(file.read(_PLACE_BYTES))
            if line is None:
                continue
            step, samples = integer(line, "step"), integer(line, "num_samples")
            loss, now = number(line, "loss"), number(line, "time_seconds")
            if step is not None and samples is not None and now is not None and abs(now) < FARTHEST and step != last:
                last = step
                yield step, samples, float("nan") if loss is None else loss, now


def _first_step(block: bytes) -> JsonLine | None:
    """Return the first complete step line in a piece of a log."""
    # The piece starts within a line.
    at = block.find(_STEP, block.find(b"\n") + 1)
    begin, end = block.rfind(b"\n", 0, max(0, at)), block.find(b"\n", max(0, at))
    return decoded_line(block[begin + 1 : end]) if at >= 0 and begin >= 0 and end >= 0 else None
