"""The steps of a run in memory, 49 bytes each, and as few points as a drawing needs."""

import bisect
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

MOST_STEPS: Final = 2**20
"""Beyond these, every second step is forgotten, again and again: what is kept stays within 49 MiB a run."""
MOST_BUCKETS: Final = 240
_DIGITS: Final = 7
_LARGEST: Final = 1e30
FARTHEST: Final = 2**42
"""Beyond, the ticks of an axis could not be told apart."""
CLIPPED, SKIPPED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The numbers of one step.

    Attributes:
        step: its number.
        samples: of its effective batch.
        seconds: since the run began, pauses between its stretches left out.
        loss: of the effective batch.
        norm: of the gradient before clipping; NaN if it was not computed.
        rate: learning rate of the first parameter group; NaN if unknown.
        flags: `CLIPPED`, `SKIPPED`, both or neither.
    """

    step: int
    samples: int
    seconds: float
    loss: float
    norm: float
    rate: float
    flags: int


@dataclass(slots=True)
class Curve:
    """The steps of a run, in order; a step that is made again replaces those from it on.

    Attributes:
        stride: of the steps, every so many-th was kept; a power of two.
    """

    stride: int = 1
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
        """Take the next step."""
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
        if len(self.steps) > MOST_STEPS:
            self._thin()

    def undo_from(self, first_step: int) -> None:
        """Forget a step and all after it: a run that is resumed makes them again."""
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
        """Return what is drawn: for each of at most `MOST_BUCKETS` pieces the least and the largest loss, and others.

        A number that is not finite is None, which leaves a gap.
        """
        size = max(1, -(-len(self.steps) // MOST_BUCKETS))
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
        """Return the places of the least and the largest loss of a piece, in order; of one without any, the first."""
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
        """Return samples per second of a piece, from the end of the step before it."""
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
    """Return a number with as many digits as a drawing can show; None for one that it cannot."""
    if not abs(value) <= _LARGEST:
        return None
    return float(f"{value:.{_DIGITS}g}") if abs(value) >= 1 / _LARGEST else 0.0
