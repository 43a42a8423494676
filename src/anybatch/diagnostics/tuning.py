"""What `tune` measured, as a value and as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.core.size_choice import NEAR_BEST, smallest_of_the_fastest

_UNNOTICED = 0.05
"""The part of a step that loading may take before it is worth a worker."""
_MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """Whole steps at one micro-batch size.

    Attributes:
        size: samples of a micro-batch.
        num_micro_batches: of them in a step.
        samples_per_second: of whole steps, update included; None if memory ran out.
        peak_bytes: the most that tensors held in a step; None if memory ran out, or it cannot be told.
    """

    size: int
    num_micro_batches: int
    samples_per_second: float | None
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingResult:
    """How fast samples are loaded, with nothing else to do.

    Attributes:
        num_workers: processes that load; 0 for the process that trains.
        samples_per_second: that arrive.
    """

    num_workers: int
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Samples per second and memory by micro-batch size, and how fast data is loaded. `print(report)` shows it.

    Attributes:
        num_samples: samples of a step.
        device: where it was measured.
        sizes: one result for each size, rising.
        loading: one result for each number of workers, rising; empty if that was not asked for.
    """

    num_samples: int
    device: str
    sizes: tuple[SizeResult, ...]
    loading: tuple[LoadingResult, ...] = ()

    @property
    def rates(self) -> dict[int, float]:
        """Return size to samples per second, of the sizes that fit."""
        return {one.size: one.samples_per_second for one in self.sizes if one.samples_per_second is not None}

    @property
    def best(self) -> int:
        """The fastest size."""
        return max(self.rates, key=lambda size: self.rates[size])

    @property
    def recommended(self) -> int:
        """The smallest size whose steps take at most 3% longer than those of the fastest: it needs the least memory."""
        return smallest_of_the_fastest({size: self.num_samples / rate for size, rate in self.rates.items()})

    @property
    def rates_with_loading(self) -> dict[int, float]:
        """Return number of workers to the samples per second that can be trained, at the recommended size.

        The process that trains loads in between; workers load meanwhile, each on a core of its own.
        """
        rate = self.rates[self.recommended]
        return {
            one.num_workers: min(rate, one.samples_per_second)
            if one.num_workers
            else rate * one.samples_per_second / (rate + one.samples_per_second)
            for one in self.loading
        }

    @property
    def loading_verdict(self) -> str:
        """What loading does to training at the recommended size, in a sentence; empty if it was not measured."""
        if not self.loading:
            return ""
        rate, found = self.rates[self.recommended], self.rates_with_loading
        best = smallest_of_the_fastest({number: 1.0 / value for number, value in found.items()})
        here = f"{1.0 - found[0] / rate:.0%} of the time in the process that trains" if 0 in found else ""
        if found[best] < (1.0 - _UNNOTICED) * rate:
            lost = f"; it takes {here}" if here else ""
            return (
                f"loading is the bottleneck: of {rate:,.0f} samples/s at most {found[best]:,.0f} are trained, "
                f"with num_workers={best}{lost}."
            )
        if not best:
            return f"loading is no bottleneck: it takes {here}."
        without = f"; without, it takes {here}" if here else ""
        cores = "a core" if best == 1 else f"{best} cores"
        return f"loading is no bottleneck with num_workers={best} and {cores} to spare{without}."

    def __str__(self) -> str:
        """Return the tables and the verdict."""
        lines = [f"{self.num_samples} samples per step, {self.device}", "", *self._curve()]
        if self.loading:
            lines += ["", "  workers  samples/s loaded"]
            lines += [f"  {one.num_workers:>7}  {one.samples_per_second:>16,.0f}" for one in self.loading]
            lines += ["", self.loading_verdict]
        return "\n".join(lines)

    def _curve(self) -> list[str]:
        rates, best, recommended = self.rates, self.best, self.recommended
        lines = ["  micro-batch  per step  samples/s  of the best   peak memory"]
        for one in self.sizes:
            rate = rates.get(one.size)
            speed = f"{'does not fit':>22}" if rate is None else f"{rate:>9,.0f}  {rate / rates[best]:>11.0%}"
            memory = "" if one.peak_bytes is None else f"{one.peak_bytes / _MEBIBYTE:>10,.1f} MiB"
            marks = [word for word, size in (("fastest", best), ("recommended", recommended)) if size == one.size]
            note = f"  <- {', '.join(marks)}" if marks else ""
            lines.append(f"  {one.size:>11}  {one.num_micro_batches:>8}  {speed}{memory:>14}{note}".rstrip())
        reason = f"the smallest within {NEAR_BEST - 1.0:.0%} of the fastest"
        return [*lines, "", f"recommended: micro_batch_size={recommended}, {reason}."]


def default_sizes(num_samples: int) -> Sequence[int]:
    """Return sizes that cut a step into 1, 2, 4, ... nearly equal parts, rising, from 2 samples on."""
    sizes = {num_samples}
    parts = 2
    while (size := -(-num_samples // parts)) >= min(2, num_samples) and parts <= num_samples:
        sizes.add(size)
        parts *= 2
    return sorted(sizes)
