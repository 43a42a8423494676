"""Chapter 24: the cost of a larger batch in samples and time, and the size with the least time to a loss.

At a learning rate that suits each size, an effective batch of B samples needs about

    steps(B)   = least_steps (1 + B_crit / B)
    samples(B) = B steps(B) = least_samples (1 + B / B_crit)

to reach the same loss, with the critical batch size B_crit (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
If a step takes `overhead + B x seconds_per_sample`, the time is least at

    B* = sqrt(B_crit x overhead / seconds_per_sample)

by setting the derivative of `(overhead + B s) (1 + B_crit / B)` to 0. Larger batches than that take longer.

Limits. B_crit changes during a run, and the noise scale used for it is an estimate. Memory is not part of the model:
accumulation leaves the seconds per sample unchanged, and only saves time by sharing the overhead.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """The cost of a run by its effective batch size, up to a factor common to all sizes.

    Attributes:
        critical_batch_size: samples; infinite if no batch is large enough.
        overhead_seconds: fixed time of a step of any size: reduction, clipping, the optimizer, launching.
        seconds_per_sample: time per sample of the whole job: on N ranks, an Nth of a single rank's.
    """

    critical_batch_size: float
    overhead_seconds: float
    seconds_per_sample: float

    @property
    def best(self) -> float:
        """The effective batch size with the least time to a loss, in samples; 0 without overhead."""
        return math.sqrt(self.critical_batch_size * self.overhead_seconds / self.seconds_per_sample)

    def steps(self, size: float, *, by: float) -> float:
        """Return the steps to the same loss at `size`, relative to size `by`."""
        return (1.0 + self.critical_batch_size / size) / (1.0 + self.critical_batch_size / by)

    def samples(self, size: float, *, by: float) -> float:
        """Return the samples to the same loss at `size`, relative to size `by`."""
        return size / by * self.steps(size, by=by)

    def step_seconds(self, size: float) -> float:
        """Return the seconds of a step."""
        return self.overhead_seconds + size * self.seconds_per_sample

    def seconds(self, size: float, *, by: float) -> float:
        """Return the time to the same loss at `size`, relative to size `by`."""
        return self.steps(size, by=by) * self.step_seconds(size) / self.step_seconds(by)

    def at(self, critical_batch_size: float) -> "BatchCost":
        """Return the same cost with another critical batch size, such as an end of its interval."""
        return replace(self, critical_batch_size=critical_batch_size)

    def on_ranks(self, num_ranks: int, reduction_seconds: float) -> "BatchCost":
        """Return the cost on `num_ranks` times the ranks; summing gradients adds `reduction_seconds` to a step."""
        return replace(
            self,
            overhead_seconds=self.overhead_seconds + reduction_seconds,
            seconds_per_sample=self.seconds_per_sample / num_ranks,
        )
