"""Chapter 24: what a larger batch costs, in samples and in time, and where the time to a loss is least.

At a learning rate that is right for each size, an effective batch of B samples needs about

    steps(B)   = least_steps (1 + B_crit / B)
    samples(B) = B steps(B) = least_samples (1 + B / B_crit)

to come to the same loss, with the critical batch size B_crit (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
Where a step takes `overhead + B x seconds_per_sample`, the time is least at

    B* = sqrt(B_crit x overhead / seconds_per_sample)

by setting the derivative of `(overhead + B s) (1 + B_crit / B)` to 0. Larger batches than that take longer.

Limits. B_crit changes in the course of a run, and the noise scale that stands for it is an estimate. Memory is not in
it: accumulation leaves the seconds per sample as they are, and so only ever pays by sharing out the overhead.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """The cost of a run by its effective batch size, up to a factor that is the same for all sizes.

    Attributes:
        critical_batch_size: samples; infinite where no batch is large enough.
        overhead_seconds: of a step, whatever its size: reduction, clipping, the optimizer, launching.
        seconds_per_sample: of the whole job, so an Nth of a rank's on N ranks.
    """

    critical_batch_size: float
    overhead_seconds: float
    seconds_per_sample: float

    @property
    def best(self) -> float:
        """The effective batch size at which the time to a loss is least, in samples; 0 without overhead."""
        return math.sqrt(self.critical_batch_size * self.overhead_seconds / self.seconds_per_sample)

    def steps(self, size: float, *, by: float) -> float:
        """Return the steps to the same loss at one size, by those at another."""
        return (1.0 + self.critical_batch_size / size) / (1.0 + self.critical_batch_size / by)

    def samples(self, size: float, *, by: float) -> float:
        """Return the samples to the same loss at one size, by those at another."""
        return size / by * self.steps(size, by=by)

    def step_seconds(self, size: float) -> float:
        """Return the seconds of a step."""
        return self.overhead_seconds + size * self.seconds_per_sample

    def seconds(self, size: float, *, by: float) -> float:
        """Return the time to the same loss at one size, by that at another."""
        return self.steps(size, by=by) * self.step_seconds(size) / self.step_seconds(by)

    def at(self, critical_batch_size: float) -> "BatchCost":
        """Return the same with another critical batch size, such as an end of its interval."""
        return replace(self, critical_batch_size=critical_batch_size)

    def on_ranks(self, num_ranks: int, reduction_seconds: float) -> "BatchCost":
        """Return the same on so many ranks, each with its share of the samples.

        Args:
            num_ranks: times as many as now.
            reduction_seconds: that a step takes longer there, for summing gradients.
        """
        return replace(
            self,
            overhead_seconds=self.overhead_seconds + reduction_seconds,
            seconds_per_sample=self.seconds_per_sample / num_ranks,
        )
