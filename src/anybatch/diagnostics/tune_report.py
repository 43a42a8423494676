"""How fast each micro-batch size was, and the loading of data, as values and as text."""

from dataclasses import dataclass

from anybatch.core.geometry import NEAR_BEST, smallest_of_the_fastest
from anybatch.memory.counted import Counted, counting_text

_GAIN_WORTH_SAYING = 0.03
_SMALL_LOSS = 0.05
"""The part of a step that loading may take before it is worth a worker."""
_MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """Whole steps at one micro-batch size.

    Attributes:
        size: samples of a micro-batch.
        num_micro_batches: of them in a step.
        samples_per_second: of whole steps, update included; None if memory ran out.
        peak_bytes: the most memory of a step, as `TuneReport.counted` says; None if memory ran out, or the device does
            not report it.
        is_estimated: it is much slower than others by its first micro-batches, and whole steps were not made.
        of_the_fastest: quartiles of the rate relative to the fastest size in the same round; None where it was
            measured once.
    """

    size: int
    num_micro_batches: int
    samples_per_second: float | None
    peak_bytes: int | None
    is_estimated: bool = False
    of_the_fastest: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingResult:
    """How fast samples are loaded, with nothing else to do."""

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
        num_batch_norms: layers that normalise within each micro-batch, so that a cut batch is trained otherwise.
        counted: how memory is counted.
    """

    num_samples: int
    device: str
    sizes: tuple[SizeResult, ...]
    loading: tuple[LoadingResult, ...] = ()
    num_batch_norms: int = 0
    counted: Counted = "in tensors"

    @property
    def rates(self) -> dict[int, float]:
        """Return size to samples per second, of the sizes that fit."""
        return {one.size: one.samples_per_second for one in self.sizes if one.samples_per_second is not None}

    @property
    def best(self) -> int:
        """The fastest size whose whole steps were timed."""
        return max(self._measured, key=lambda size: self.rates[size])

    @property
    def recommended(self) -> int:
        """The smallest size whose steps take at most 3% longer than the fastest: it needs the least memory.

        If a split changes the training, the whole batch if it fits, else the largest size that does.
        """
        if self.num_batch_norms:
            return max(self.rates)
        return smallest_of_the_fastest({size: self.num_samples / self.rates[size] for size in self._measured})

    @property
    def _measured(self) -> list[int]:
        return [one.size for one in self.sizes if one.samples_per_second is not None and not one.is_estimated]

    @property
    def rates_with_loading(self) -> dict[int, float]:
        """Return number of workers to the samples per second that can be trained, at the recommended size.

        The training process loads between steps; workers load meanwhile, each on its own core.
        """
        rate = self.rates[self.recommended]
        return {
            one.num_workers: min(rate, one.samples_per_second)
            if one.num_workers
            # In one process the times of training and of loading add up, so the rates combine harmonically.
            else rate * one.samples_per_second / (rate + one.samples_per_second)
            for one in self.loading
        }

    @property
    def loading_verdict(self) -> str:
        """How loading limits training at the recommended size, in a sentence; empty if it was not measured."""
        if not self.loading:
            return ""
        rate, found = self.rates[self.recommended], self.rates_with_loading
        best = smallest_of_the_fastest({number: 1.0 / value for number, value in found.items()})
        here = f"{1.0 - found[0] / rate:.0%} of training time with num_workers=0" if 0 in found else ""
        if found[best] < (1.0 - _SMALL_LOSS) * rate:
            lost = f"; loading takes {here}" if here else ""
            return (
                f"data loading is the bottleneck: of {rate:,.0f} samples/s at most {found[best]:,.0f} are trained, "
                f"with num_workers={best}{lost}."
            )
        if not best:
            return f"data loading keeps up: it takes {here}."
        without = f"; loading takes {here}" if here else ""
        cores = "a core" if best == 1 else f"{best} cores"
        return f"data loading keeps up with num_workers={best} and {cores} to spare{without}."

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
        lines = [f"  micro-batch  per step  samples/s    of the best{self.counted:>14}"]
        for one in self.sizes:
            rate = rates.get(one.size)
            if rate is None:
                speed = f"{'does not fit':>24}"
            else:
                low, high = one.of_the_fastest or (0.0, 0.0)
                between = f" ({low:.0%}-{high:.0%})" if round(low, 2) != round(high, 2) else ""
                about = "~" if one.is_estimated else ""
                speed = f"{about + format(rate, ',.0f'):>9}  {f'{rate / rates[best]:.0%}{between}':>13}"
            memory = "" if one.peak_bytes is None else f"{one.peak_bytes / _MEBIBYTE:>10,.1f} MiB"
            marks = [word for word, size in (("fastest", best), ("recommended", recommended)) if size == one.size]
            note = f"  <- {', '.join(marks)}" if marks else ""
            lines.append(f"  {one.size:>11}  {one.num_micro_batches:>8}  {speed}{memory:>14}{note}".rstrip())
        if any(one.is_estimated for one in self.sizes):
            lines += ["", "~ estimated from one and two micro-batches: too slow for whole steps."]
        return [*lines, "", counting_text(self.counted), self._advice()]

    def _advice(self) -> str:
        size = f"recommended: micro_batch_size={self.recommended}"
        if not self.num_batch_norms:
            return f"{size}, the smallest within {NEAR_BEST - 1.0:.0%} of the fastest."
        layers = f"{self.num_batch_norms} BatchNorm layer{'s' * (self.num_batch_norms > 1)}"
        which = "the whole batch" if self.recommended == self.num_samples else "the largest that fits"
        gain = self.rates[self.best] / self.rates[self.recommended] - 1.0
        faster = f" micro_batch_size={self.best} is {gain:.0%} faster, but trains differently."
        faster = faster if gain >= _GAIN_WORTH_SAYING else ""
        return (
            f"{size}, {which}: {layers} normalise{'s' * (self.num_batch_norms == 1)} within each micro-batch, so every "
            f"size trains differently (norms='exact' makes splits equal).{faster}"
        )
