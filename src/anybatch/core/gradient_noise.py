"""The noise of an effective batch's gradient, from the norms of its micro-batches' gradients.

Let g be the gradient of an effective batch: the sum of parts g_k, one per micro-batch, each divided by the number of
items in the whole batch. Let p_k be the fraction of these items in micro-batch k (p_1 + p_2 + ... = 1). If samples are
drawn independently, each part has the mean p_k G, where G is the gradient over all data, so

    |G|^2       is estimated by  (|g|^2 - sum |g_k|^2) / (1 - sum p_k^2)
    variance(g) is estimated by  sum |g_k|^2 - |G|^2 sum p_k^2

Both are unbiased for micro-batches of any sizes, on any ranks, and of unequal noise: the first averages the inner
products of different micro-batches, and variances of independent parts add up. For equal micro-batches they equal the
estimates of McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1.

The *noise scale* is N variance(g) / |G|^2 with N samples in the batch: the batch size at which noise and gradient are
equally large. Numerator and denominator are averaged over steps before the division: the ratio of a single step is very
noisy, and the mean of such ratios is not the ratio of the means.

Limits. The noise scale is only an estimate of the critical batch size: it assumes a loss of equal curvature in all
directions (the paper's B_simple), and Merrill et al. 2025, arXiv 2505.23971, find it unreliable. If samples are drawn
without replacement from a set of M, the estimate of |G|^2 is for the distribution of the set; for the set itself, add
(variance of a sample) / M. A mean over tokens has the mean G only if length and gradient are independent.

At a learning rate that suits each size, an effective batch of B samples needs about

    steps(B)   = min_steps (1 + B_crit / B)
    samples(B) = B steps(B) = min_samples (1 + B / B_crit)

to reach the same loss, with the critical batch size B_crit (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
If a step takes `overhead + B x seconds_per_sample`, the total time has its minimum at

    B* = sqrt(B_crit x overhead / seconds_per_sample)

where the derivative of `(overhead + B s) (1 + B_crit / B)` is 0.

Limits. B_crit grows during a run (Zhang et al. 2024, arXiv 2410.21676: with the tokens, hardly with the model), and is
replaced by the noise scale. Accumulation leaves the seconds per sample unchanged, and only shares the overhead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.geometry import checked_int
from anybatch.errors import UserError

ALL = "all parameters"
"""Name of the only row of the moments, in records and checkpoints."""
NUM_MOMENTS = 9
"""Columns of the moments: sums over steps of w, wA, wV, w^2, w^2 A, w^2 V, w^2 A^2, w^2 A V, w^2 V^2.

w is the weight of a step, A its estimate of |G|^2, and V its estimate of the variance of one sample's gradient.
"""
_MIN_STEPS = 10.0
_NORMAL = 1.959963984540054
# Abramowitz and Stegun 1964, 26.7.5: the quantile of Student's t as a series in 1 / (degrees of freedom), at 97.5%.
_STUDENT = (
    (_NORMAL**3 + _NORMAL) / 4,
    (5 * _NORMAL**5 + 16 * _NORMAL**3 + 3 * _NORMAL) / 96,
    (3 * _NORMAL**7 + 19 * _NORMAL**5 + 17 * _NORMAL**3 - 15 * _NORMAL) / 384,
    (79 * _NORMAL**9 + 776 * _NORMAL**7 + 1482 * _NORMAL**5 - 1920 * _NORMAL**3 - 945 * _NORMAL) / 92160,
)


class NoiseParts(NamedTuple):
    """The estimates of |G|^2 and variance(g) from one effective batch; tensors of any shape."""

    squared_norm: Tensor
    variance: Tensor


def noise_parts(of_sum: Tensor, of_parts: Tensor, squared_shares: "Tensor | float") -> NoiseParts:
    """Return the two unbiased estimates from one effective batch.

    `of_sum` is |g|^2, `of_parts` sum |g_k|^2, and `squared_shares` sum p_k^2. The squared norm equals
    `sum(g_j @ g_k) / sum(p_j * p_k)` over all pairs of different micro-batches.
    """
    squared_norm = (of_sum - of_parts) / (1.0 - squared_shares)
    return NoiseParts(squared_norm, of_parts - squared_norm * squared_shares)


def with_step(
    moments: Float[Tensor, "row 9"], parts: NoiseParts, *, weight: "Tensor | float", num_samples: int, decay: float
) -> Float[Tensor, "row 9"]:
    """Return the moments with one step added and the earlier steps decayed, without waiting for the device.

    A step with non-finite numbers (an fp16 overflow) leaves the moments unchanged. `weight` is the number of pairs of
    samples in different micro-batches, `N^2 (1 - sum p_k^2)`, so that a small last batch gets little weight. `decay` is
    the factor by which each later step reduces the weight of a step.
    """
    w, (a, v) = torch.as_tensor(weight).to(moments), (parts.squared_norm, num_samples * parts.variance)
    first = torch.stack([torch.ones_like(a), a, v], dim=1)
    second = torch.stack([torch.ones_like(a), a, v, a * a, a * v, v * v], dim=1)
    added = torch.cat([w * first, w * w * second], dim=1)
    faded = torch.cat([decay * moments[:, :3], decay * decay * moments[:, 3:]], dim=1) + added
    return torch.where(added.isfinite().all(), faded, moments)


def noise_interval(moments: Float[Tensor, "row 9"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the noise scale of each row in samples, and the ends of its 95% interval: tensors of shape (rows,).

    The upper end is infinite while |G|^2 cannot be distinguished from 0: then only a lower bound is known. The
    intervals follow Fieller 1954, "Some problems in interval estimation": they contain every ratio r for which the mean
    of V - r A differs from 0 by at most its standard error times the quantile of Student's t. Steps are assumed to be
    independent, and their mean to be normal. The interval is 0 to infinity before the effective number of steps is 10.
    """
    w, wa, wv, ww, wwa, wwv, wwaa, wwav, wwvv = moments.unbind(dim=1)
    mean_a, mean_v = wa / w, wv / w
    num_steps = w * w / ww
    # Variances of the means: weighted squares around them, times n / (n - 1) because the mean is estimated too.
    unbiased = num_steps / (num_steps - 1.0) / (w * w)
    var_a = unbiased * (wwaa - 2 * mean_a * wwa + mean_a**2 * ww)
    var_v = unbiased * (wwvv - 2 * mean_v * wwv + mean_v**2 * ww)
    cov = unbiased * (wwav - mean_a * wwv - mean_v * wwa + mean_a * mean_v * ww)
    freedom = num_steps - 1.0
    t2 = (_NORMAL + sum(factor / freedom**power for power, factor in enumerate(_STUDENT, start=1))) ** 2
    # (mean_v - r mean_a)^2 <= t2 (var_v - 2 r cov + r^2 var_a), as a r^2 - 2 b r + c <= 0.
    a, b, c = mean_a**2 - t2 * var_a, mean_a * mean_v - t2 * cov, mean_v**2 - t2 * var_v
    root = (b * b - a * c).clamp(min=0.0).sqrt()
    is_bounded, infinite, enough = (a > 0) & (mean_a > 0), torch.full_like(a, math.inf), num_steps >= _MIN_STEPS
    # The lower positive root, in the form without a difference of nearly equal numbers.
    low = torch.where((b + root > 0) & (c > 0), c / (b + root), torch.zeros_like(c))
    high = torch.where(is_bounded, (b + root) / a, infinite)
    return mean_v / mean_a, torch.where(enough, low, torch.zeros_like(low)), torch.where(enough, high, infinite)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Settings to measure the gradient's noise scale: `Engine(..., noise=GradientNoise())`.

    Args:
        every: steps between measurements; each measurement reads the gradient of every micro-batch once more.
        decay: weight of a measurement relative to the next one; 0.99 averages over about 200 measurements.

    Raises:
        UserError: an invalid value.
    """

    every: int = 10
    decay: float = 0.99

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        checked_int("every", self.every)
        if not 0.0 < self.decay < 1.0:
            message = f"decay={self.decay} must be between 0 and 1, such as 0.99 for an average over 200 measurements."
            raise UserError(message)


# eq=False: comparing two estimates would compare tensors, and wait for the device.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoiseEstimate:
    """The gradient noise, averaged over steps. Reading a number waits for the device; `str` gives one line."""

    moments: Float[Tensor, "1 9"]  # sums over steps, on the device; see `with_step`
    items: str = "samples"  # the items over which the loss is a mean, such as "tokens"
    items_per_sample: "Tensor | float" = 1.0  # number of items per sample in the last batch

    @property
    def scale(self) -> float:
        """The noise scale in samples, an estimate of the critical batch size; NaN before the first step."""
        scale = float(noise_interval(self.moments)[0])
        return math.inf if scale < 0 else scale

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the noise scale; the upper end is infinite while only a lower bound is known."""
        _, low, high = noise_interval(self.moments)
        return float(low), float(high)

    @property
    def is_known(self) -> bool:
        """Whether the interval has an upper end."""
        return math.isfinite(self.interval[1])

    @property
    def squared_norm(self) -> float:
        """The squared norm of the gradient over all data."""
        return float(self.moments[0, 1] / self.moments[0, 0])

    @property
    def variance(self) -> float:
        """The variance of the gradient of one sample: n times the variance of the mean over n samples."""
        return float(self.moments[0, 2] / self.moments[0, 0])

    def __str__(self) -> str:
        """Return the estimate and its interval, or its lower bound."""
        return in_words(self.scale, self.interval, self.items, float(self.items_per_sample))


def in_words(scale: float, interval: Sequence[float], items: str = "samples", items_per_sample: float = 1.0) -> str:
    """Return an estimate of the noise scale as text: `noise scale about 412 samples (estimate; 95% interval ...)`."""
    low, high = interval
    if math.isinf(high):
        known = f"noise scale at least {low:,.0f} samples" if low > 0 else "noise scale not known yet"
        return known if low <= 0 else f"{known} (estimate; no upper end yet)"
    each = "" if items == "samples" else f", {scale * items_per_sample:,.0f} {items}"
    return f"noise scale about {scale:,.0f} samples{each} (estimate; 95% interval {low:,.0f} to {high:,.0f} samples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """The steps, samples and time that a run needs to reach a loss, as functions of its effective batch size."""

    critical_batch_size: float  # samples; infinite if no batch is large enough
    overhead_seconds: float  # fixed time of a step of any size: reduction, clipping, the optimizer, launching
    seconds_per_sample: float  # time per sample over all ranks: on N ranks, 1/N of the time of a single rank

    @property
    def best(self) -> float:
        """The effective batch size that reaches a loss in the shortest time, in samples; 0 without overhead."""
        return math.sqrt(self.critical_batch_size * self.overhead_seconds / self.seconds_per_sample)

    def steps(self, size: float, *, by: float) -> float:
        """Return the number of steps to the same loss at `size`, divided by the number at size `by`."""
        return (1.0 + self.critical_batch_size / size) / (1.0 + self.critical_batch_size / by)

    def samples(self, size: float, *, by: float) -> float:
        """Return the number of samples to the same loss at `size`, divided by the number at size `by`."""
        return size / by * self.steps(size, by=by)

    def step_seconds(self, size: float) -> float:
        """Return the seconds of a step with `size` samples."""
        return self.overhead_seconds + size * self.seconds_per_sample

    def seconds(self, size: float, *, by: float) -> float:
        """Return the time to the same loss at `size`, divided by the time at size `by`."""
        return self.steps(size, by=by) * self.step_seconds(size) / self.step_seconds(by)

    def at(self, critical_batch_size: float) -> "BatchCost":
        """Return the same cost with another critical batch size, such as an end of its interval."""
        return replace(self, critical_batch_size=critical_batch_size)
