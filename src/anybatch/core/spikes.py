"""Detect losses and gradient norms that deviate from the steps before.

Both are compared as logarithms, since a loss that doubles is as alarming at 0.1 as at 10, and by medians, so that a
spike does not move its own reference (Hampel 1974, JASA 69: median and median absolute deviation tolerate almost half
of the values being wrong). A single value is weak evidence and several in a row are strong: deviations are summed (Page
1954, Biometrika 41: cumulative sums).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from anybatch.core.geometry import checked_int
from anybatch.errors import UserError

_TO_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""
_SHIFTS = (1.0, 1.5, 2.0, 3.0)
"""Shifts subtracted from each deviation before summing: small ones find slow changes, large ones fast changes."""
_MOST_DEVIATIONS = 6.0
"""Maximum contribution of one value, to limit the weight of a single bad value."""
_NEAR_ZERO = 0.4
"""Minimum deviation of the logarithm at which a loss counts as near zero, where a few hard samples dominate a batch."""
_GIVEN_BACK = 0.15
"""Fraction of the total decrease that a loss near zero must lose again."""
_NUM_FIRST = 3
"""Number of first losses whose median represents the untrained model."""
_LEAST_VALUE = 1e-30
"""Lower bound of a loss or gradient norm before the logarithm."""

Quantity = Literal["loss", "gradient norm"]
Form = Literal["not finite", "jump", "rise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """Thresholds for a spike. The defaults were found on small runs, see `benchmarks/spike_watch.py`.

    The deviation of a value is its distance in logarithms above the level, in units of the scatter of the window about
    its trend. The level is the median of the newer half of the window for a gradient norm, and the lowest such level so
    far for a loss, which should never rise above it.

    A *jump* is one value that deviates by more than `jump`. A *rise* is a sum: for a shift k of 1 to 3 deviations, each
    value adds its deviation minus k, the sum is kept at 0 or more, and a sum above `strictness` / k is a rise. For
    normal values that happens by chance in about exp(-2 strictness) of the steps.

    A loss near zero scatters by more than half of its value, so its logarithm jumps with any hard sample. Such a loss
    must also have lost a seventh of its decrease since the beginning.

    Args:
        window: steps from which level and scatter are computed.
        least: minimum number of steps before a spike is possible.
        jump: deviations.
        strictness: higher values detect later and with more certainty.
        norm_weight: weight of a deviation of a gradient norm, whose distribution has heavier tails than the loss.
        floor: minimum deviation of the logarithm; smaller scatter is ignored.

    Raises:
        UserError: a number that cannot be used.
    """

    window: int = 64
    least: int = 24
    jump: float = 8.0
    strictness: float = 7.0
    norm_weight: float = 0.5
    floor: float = 0.05

    def __post_init__(self) -> None:
        """Check each number."""
        for name in ("window", "least"):
            checked_int(name, getattr(self, name), least=8)
        for name in ("jump", "strictness", "norm_weight", "floor"):
            if not 0.0 < getattr(self, name) < math.inf:
                message = f"{name}={getattr(self, name)!r} must be a finite number above 0."
                raise UserError(message, code="not_positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A value that deviates from the steps before; it prints as a sentence without a full stop.

    Attributes:
        step: number of the step, from 0 on.
        quantity: "loss" or "gradient norm".
        form: not finite, a jump of one value, or a rise over several.
        value: the deviating value.
        level: level of the steps before; NaN without earlier steps.
        deviations: distance of the logarithms in deviations; infinite for a value that is not finite.
        num_steps: number of steps of the rise.
    """

    step: int
    quantity: Quantity
    form: Form
    value: float
    level: float
    deviations: float
    num_steps: int

    def __str__(self) -> str:
        """Return it in words, with both values."""
        if self.form == "not finite":
            return f"the {self.quantity} of step {self.step} is not finite; the steps before were at {self.level:.4g}"
        over = f" over {self.num_steps} steps" if self.num_steps > 1 else ""
        verb = "jumped" if self.form == "jump" else "rose"
        return (
            f"the {self.quantity} {verb} from {self.level:.4g} to {self.value:.4g} in step {self.step}{over}, "
            f"{self.deviations:.1f} deviations"
        )


class SpikeDetector:
    """Checks the losses and gradient norms of a run step by step; a step takes less than 0.1 ms on the host."""

    def __init__(self, rule: SpikeRule) -> None:
        self._loss = _Series(rule, weight=1.0, above_lowest=True)
        self._norm = _Series(rule, weight=rule.norm_weight, above_lowest=False)

    @property
    def is_calm(self) -> bool:
        """Whether neither series is close to a spike, so that the current state is safe to roll back to."""
        return self._loss.is_calm and self._norm.is_calm

    def look(self, step: int, loss: float, gradient_norm: float | None) -> Spike | None:
        """Add the values of a step; return their spike, the loss first, or None.

        `gradient_norm` is the norm before clipping, or None if not measured.
        """
        of_loss = self._loss.look(step, "loss", loss)
        of_norm = None if gradient_norm is None else self._norm.look(step, "gradient norm", gradient_norm)
        return of_loss or of_norm

    def begin_again(self) -> None:
        """Reset the sums after an outside change of the run: a roll-back or another learning rate."""
        self._loss.begin_again()
        self._norm.begin_again()


def spikes_of(values: Iterable[tuple[int, float, float | None]], rule: SpikeRule) -> list[Spike]:
    """Return the spikes of a finished run from its (step, loss, gradient norm) values, only the first of each episode.

    An episode ends after half a window of ordinary values.
    """
    detector, found, last = SpikeDetector(rule), list[Spike](), -math.inf
    for step, loss, norm in values:
        spike = detector.look(step, loss, norm)
        if spike is not None:
            if step - last > rule.window / 2:
                found.append(spike)
            last = step
    return found


class _Series:
    """The logarithms of one quantity; deviations are from the lowest level if `above_lowest`, times `weight`."""

    def __init__(self, rule: SpikeRule, *, weight: float, above_lowest: bool) -> None:
        self._rule = rule
        self._weight = weight
        self._above_lowest = above_lowest
        self._window: deque[float] = deque(maxlen=rule.window)
        self._lowest = (math.inf, rule.floor)
        self._first = 0.0
        self._sums = dict.fromkeys(_SHIFTS, 0.0)
        self._lengths = dict.fromkeys(_SHIFTS, 0)
        self.is_calm = True

    def look(self, step: int, quantity: Quantity, value: float) -> Spike | None:
        """Add a value; return its spike, or None."""
        rule = self._rule
        if not math.isfinite(value):
            self.is_calm = False
            level = math.exp(median(self._window)) if self._window else math.nan
            return Spike(
                step=step,
                quantity=quantity,
                form="not finite",
                value=value,
                level=level,
                deviations=math.inf,
                num_steps=1,
            )
        log = math.log(max(value, _LEAST_VALUE))
        if len(self._window) < rule.least:
            self._window.append(log)
            self._first = math.exp(median(list(self._window)[:_NUM_FIRST]))
            return None
        level, deviation = level_and_deviation(self._window, rule.floor)
        # Limit outliers, so that they do not raise the level.
        self._window.append(min(log, level + _MOST_DEVIATIONS * deviation))
        if self._above_lowest:
            self._lowest = min(self._lowest, (level, deviation))
            level, deviation = self._lowest[0], max(deviation, self._lowest[1])
        deviations = (log - level) / deviation
        num_steps = self._add_up(deviations * self._weight)
        if not num_steps or (self._above_lowest and deviation > _NEAR_ZERO and not self._recovered(value, level)):
            return None
        return Spike(
            step=step,
            quantity=quantity,
            form="jump" if num_steps == 1 else "rise",
            value=value,
            level=math.exp(level),
            deviations=deviations,
            num_steps=num_steps,
        )

    def _recovered(self, value: float, level: float) -> bool:
        lowest = math.exp(level)
        return value > lowest + _GIVEN_BACK * (self._first - lowest)

    def begin_again(self) -> None:
        """Reset the sums."""
        self._sums = dict.fromkeys(_SHIFTS, 0.0)
        self._lengths = dict.fromkeys(_SHIFTS, 0)

    def _add_up(self, deviations: float) -> int:
        """Return the number of steps of a spike; 0 for none."""
        is_jump, num_steps, worst = deviations > self._rule.jump, 0, 0.0
        for shift in _SHIFTS:
            total = self._sums[shift] = max(0.0, self._sums[shift] + min(deviations, _MOST_DEVIATIONS) - shift)
            self._lengths[shift] = self._lengths[shift] + 1 if total else 0
            worst = max(worst, total * shift / self._rule.strictness)
            if total * shift > self._rule.strictness and not num_steps:
                num_steps = self._lengths[shift]
        self.is_calm = worst < 1.0 / 2.0 and not is_jump
        return 1 if is_jump else num_steps


def level_and_deviation(values: Sequence[float], floor: float) -> tuple[float, float]:
    """Return the median of the newer half, and the scatter of all values about their trend, at least `floor`.

    `values` (at least 2) are in step order. The trend is the line through the medians of both halves. It is removed
    from the scatter but not extrapolated: a loss falls ever more slowly, and would exceed its own trend.
    """
    number = len(values) // 2
    every = list(values)
    older, newer = every[:number], every[number:]
    level = median(newer)
    slope = (level - median(older)) * 2 / len(every)
    middle = number + (len(newer) - 1) / 2
    rest = [abs(value - level - slope * (place - middle)) for place, value in enumerate(every)]
    return level, max(floor, _TO_DEVIATION * median(rest))
