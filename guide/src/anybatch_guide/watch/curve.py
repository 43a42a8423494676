"""Curves of a run: the values of its steps, reduced for drawing, and a preview of a long log."""

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
"""If there are more steps, every second one is dropped, so that a run needs at most 49 MiB."""
MAX_BUCKETS: Final = 240
_DIGITS: Final = 7
_LARGEST: Final = 1e30
AXIS_LIMIT: Final = 2**42
"""Larger values are drawn at this value, because the ticks of their axis would be equal."""
CLIPPED, SKIPPED, UNREAD = 1, 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The values of one step."""

    step: int  # number of the step
    samples: int  # samples of the effective batch
    seconds: float  # time since the start of the run, without pauses between resumes
    loss: float  # loss of the effective batch
    norm: float  # gradient norm before clipping; NaN if it was not computed
    rate: float  # learning rate of the first parameter group; NaN if unknown
    flags: int  # a sum of `CLIPPED`, `SKIPPED` and `UNREAD` (the log has no loss)


@dataclass(slots=True)
class Curve:
    """The steps of a run, in order; adding an earlier step again first drops that step and all later ones."""

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
            self.drop_from(step.step)
        self.last = step
        self.num_samples = min(self.num_samples + step.samples, 2**62)
        self.num_clipped += step.flags & CLIPPED
        self.num_skipped += (step.flags & SKIPPED) >> 1
        if step.step % self.stride:
            return
        values = (step.step, self.num_samples, step.seconds, step.loss, step.norm, step.rate, step.flags)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        if len(self.steps) > MAX_STEPS:
            self._thin()

    def drop_from(self, first_step: int) -> None:
        """Drop a step and all later steps, because a resumed run repeats them."""
        if self.last is None or self.last.step < first_step:
            return
        index = bisect.bisect_left(self.steps, first_step)
        dropped_flags = self.flags[index:]
        self.num_clipped = max(0, self.num_clipped - sum(flags & CLIPPED for flags in dropped_flags))
        self.num_skipped = max(0, self.num_skipped - sum((flags & SKIPPED) >> 1 for flags in dropped_flags))
        for column in self._columns:
            del column[index:]
        self.num_samples = self.samples[-1] if self.samples else 0
        self.last = self._step_at(-1) if self.steps else None

    def points(self) -> dict[str, Any]:
        """Return the curves for drawing, in at most `MAX_BUCKETS` sections of steps.

        Each section contributes its smallest and its largest loss, and one value of each other curve; None is a gap.
        """
        size = max(1, -(-len(self.steps) // MAX_BUCKETS))
        indices: list[int] = []
        sections: list[list[float | int | None]] = []
        for begin in range(0, len(self.steps), size):
            end = min(begin + size, len(self.steps))
            indices += self._extremes(begin, end)
            sections.append([self._speed(begin, end), *self._others(begin, end)])
        speeds, norms, rates, clipped = map(list, zip(*sections, strict=True)) if sections else ([], [], [], [])
        lasts = [min(begin + size, len(self.steps)) - 1 for begin in range(0, len(self.steps), size)]
        return {
            "loss": self._curve_at(indices, [plain(self.losses[index]) for index in indices]),
            "speed": self._curve_at(lasts, speeds),
            "norm": self._curve_at(lasts, norms),
            "rate": self._curve_at(lasts, rates),
            "clipped": self._curve_at(lasts, clipped),
        }

    @property
    def _columns(self) -> "tuple[array[Any], ...]":
        return self.steps, self.samples, self.seconds, self.losses, self.norms, self.rates, self.flags

    def _step_at(self, index: int) -> Step:
        before = self.samples[index - 1] if len(self.steps) > 1 else 0
        return Step(
            step=self.steps[index],
            samples=self.samples[index] - before,
            seconds=self.seconds[index],
            loss=self.losses[index],
            norm=self.norms[index],
            rate=self.rates[index],
            flags=self.flags[index],
        )

    def _thin(self) -> None:
        self.stride *= 2
        kept = [index for index, step in enumerate(self.steps) if step % self.stride == 0]
        for column in self._columns:
            column[:] = array(column.typecode, [column[index] for index in kept])

    def _extremes(self, begin: int, end: int) -> list[int]:
        """Return the indices of the smallest and the largest loss of a section, in order; without losses, the first."""
        section = self.losses[begin:end]
        finite = section if math.isfinite(sum(section)) else [value for value in section if math.isfinite(value)]
        if not finite:
            return [begin]
        smallest, largest = section.index(min(finite)), section.index(max(finite))
        return [begin + index for index in sorted({smallest, largest})]

    def _others(self, begin: int, end: int) -> tuple[float | None, float | None, float]:
        norms = [value for value in self.norms[begin:end] if math.isfinite(value)]
        clipped = sum(flags & CLIPPED for flags in self.flags[begin:end]) / (end - begin)
        return (plain(max(norms)) if norms else None), plain(self.rates[end - 1]), round(clipped, 4)

    def _speed(self, begin: int, end: int) -> float | None:
        """Return samples per second of a section, from the end of the previous step."""
        before = max(0, begin - 1)
        seconds = self.seconds[end - 1] - self.seconds[before]
        return plain((self.samples[end - 1] - self.samples[before]) / seconds) if seconds > 0 else None

    def _curve_at(self, indices: Sequence[int], values: list[float | int | None]) -> dict[str, Any]:
        return {
            "step": [min(self.steps[index], AXIS_LIMIT) for index in indices],
            "samples": [min(self.samples[index], AXIS_LIMIT) for index in indices],
            "seconds": [round(self.seconds[index], 3) for index in indices],
            "value": values,
        }


def plain(value: float) -> float | None:
    """Return a number rounded for a chart; None if it cannot be drawn."""
    if not abs(value) <= _LARGEST:
        return None
    return float(f"{value:.{_DIGITS}g}") if abs(value) >= 1 / _LARGEST else 0.0


MIN_BYTES: Final = 32 * 2**20
"""Smaller logs have no preview, because reading them completely takes about as long."""
NUM_PREVIEW_STEPS: Final = 200
_PREVIEW_BLOCK_BYTES: Final = 1 << 16
_STEP: Final = b'"kind":"step"'


def preview_of(path: Path, size: int) -> dict[str, Any] | None:
    """Return about `NUM_PREVIEW_STEPS` steps of a log as points of a curve; None if steps repeat or the clock changed.

    Numbers of samples assume that all steps have the same number of samples.
    """
    try:
        rows = list(_preview_steps(path, size))
    except OSError:
        return None
    steps = [step for step, *_ in rows]
    seconds = [index for *_, index in rows]
    is_in_order = all(a < b for a, b in itertools.pairwise(steps)) and seconds == sorted(seconds)
    if len(rows) < NUM_PREVIEW_STEPS // 4 or not is_in_order:
        return None
    return {
        "step": [min(step, AXIS_LIMIT) for step in steps],
        "samples": [min((step + 1) * samples, AXIS_LIMIT) for step, samples, *_ in rows],
        "seconds": [round(min(index - seconds[0], 1e9), 3) for index in seconds],
        "value": [plain(loss) for _, _, loss, _ in rows],
    }


def _preview_steps(path: Path, size: int) -> Iterator[tuple[int, int, float, float]]:
    """Yield step, samples, loss and time of the first step after each of `NUM_PREVIEW_STEPS` positions in the log."""
    last = -1
    with path.open("rb") as file:
        for position in range(NUM_PREVIEW_STEPS):
            file.seek(position * size // NUM_PREVIEW_STEPS)
            line = _first_step(file.read(_PREVIEW_BLOCK_BYTES))
            if line is None:
                continue
            step, samples = integer(line, "step"), integer(line, "num_samples")
            loss, now = number(line, "loss"), number(line, "time_seconds")
            if step is not None and samples is not None and now is not None and abs(now) < AXIS_LIMIT and step != last:
                last = step
                yield step, samples, float("nan") if loss is None else loss, now


def _first_step(block: bytes) -> JsonLine | None:
    """Return the first complete step line in a block of a log; None if there is none."""
    # The block starts in the middle of a line.
    index = block.find(_STEP, block.find(b"\n") + 1)
    begin, end = block.rfind(b"\n", 0, max(0, index)), block.find(b"\n", max(0, index))
    return decoded_line(block[begin + 1 : end]) if index >= 0 and begin >= 0 and end >= 0 else None
