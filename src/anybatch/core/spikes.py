"""Detect losses and gradient norms that deviate from the steps before.

Values are compared as logarithms, since a loss that doubles is as alarming at 0.1 as at 10. The reference is a median,
so that a spike does not change its own reference (Hampel 1974, JASA 69: median and median absolute deviation tolerate
almost half of the values being wrong). A single value is weak evidence and several in a row are strong evidence, so
deviations are summed (Page 1954, Biometrika 41: cumulative sums).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, get_args

from anybatch.core.geometry import checked_int
from anybatch.errors import UserError

_TO_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of a normal distribution."""
_SHIFTS = (1.0, 1.5, 2.0, 3.0)
"""Shifts subtracted from each deviation before summing: small ones find slow changes, large ones fast changes."""
_MAX_DEVIATIONS = 6.0
"""Cap of one value, in deviations, in the sums and in the window, to limit the weight of a single bad value."""
_NEAR_ZERO = 0.4
"""A loss counts as near zero if its logarithm scatters by more than this: a few hard samples dominate each batch."""
_MIN_LOST_FRACTION = 0.15
"""Minimum rise of a loss near zero that is a spike, as a fraction of its total decrease since the beginning."""
_NUM_FIRST = 3
"""Number of first losses whose median represents the untrained model, and of last losses that an early rise raises."""
_EARLY_FACTORS, _EARLY_DEVIATIONS, _EARLY_CAUTION = (3.0, 100.0), 6.0, 8.0
"""An early rise multiplies a loss by the first factor and has 6 (1 + 8 / n) deviations, if the deviation is from n
second differences; or by the second factor."""
_JUMP = 8.0
"""Minimum deviation of a single value that is a spike, in deviations."""
_NORM_WEIGHT = 0.5
"""Weight of a deviation of a gradient norm, because gradient norms have outliers more often than losses."""
_FLOOR = 0.05
"""Lower bound of the standard deviation of the logarithms; smaller scatter is ignored."""
_CHANCE_GROWTH, _CHANCE_START = 0.6, 130
"""The lowest of n noisy levels counts as too low by 0.6 log(n / 130) of their standard errors. That is 4 errors for
100,000 steps, as expected by chance, and less for runs of hundreds of steps, on which the thresholds were tuned."""
_MIN_VALUE = 1e-30
"""Lower bound of a loss or gradient norm before the logarithm."""

Quantity = Literal["loss", "gradient norm"]
Form = Literal["not finite", "jump", "rise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """Thresholds for a spike. The defaults were tuned on small runs, see `benchmarks/spike_watch.py`.

    The *level* of a gradient norm is the median of the newer half of the window, a number of recent steps. The level of
    a loss is the lowest such median so far, corrected for chance, since a loss should never rise. The *deviation* is
    the distance of a value's logarithm above the logarithm of the level, divided by the scatter of the window (a robust
    standard deviation, about the trend).

    A *jump* is one value with a deviation above 8. A *rise* is a sum over steps: for a shift k of 1 to 3 deviations,
    each value adds its deviation minus k, a negative sum is set to 0, and a sum above `strictness` / k is a rise. For
    normally distributed values this happens by chance in about 1 of 40,000 steps (exp(-2 strictness), if level and
    scatter were known).

    A loss near zero scatters by more than half of its value, so its logarithm jumps with any hard sample. For such a
    loss, a spike must also exceed 15% of the total decrease since the beginning of the run.

    In the first `window` steps, an *early rise* is a spike too: two of the last three losses exceed the lowest level so
    far (of the first loss, and of each three losses) 3 times and by 6 standard deviations (of second differences), or
    100 times. So steps 0 and 1 are judged in step 2. Before `least` there is only this rule, and gradient norms are not
    judged. A squared error of one or two numbers per step may rise as much by chance.

    Args:
        window: number of steps from which level and scatter are computed.
        least: number of steps from which on jumps and rises are possible.
        strictness: higher values find spikes later, with fewer false alarms.

    Raises:
        UserError: `window` or `least` is below 8, or `strictness` is not above 0.
    """

    window: int = 64
    least: int = 24
    strictness: float = 7.0

    def __post_init__(self) -> None:
        """Check each number."""
        for name in ("window", "least"):
            checked_int(name, getattr(self, name), minimum=8)
        if not 0.0 < self.strictness < math.inf:
            message = f"strictness={self.strictness!r} must be a finite number above 0."
            raise UserError(message, code="not_positive")


@dataclass(frozen=True, slots=True)
class Spike:
    """A value that deviates from the steps before; `str` gives a sentence without a full stop."""

    step: int  # number of the step, from 0 on
    quantity: Quantity  # "loss" or "gradient norm"
    form: Form  # "not finite", "jump" (of one value) or "rise" (over several values)
    value: float  # the deviating value
    level: float  # level of the steps before, see `SpikeRule`; NaN without earlier steps
    deviations: float  # deviation of the value, see `SpikeRule`; infinite for a value that is not finite
    num_steps: int  # number of steps of the rise; 1 for other forms

    def __str__(self) -> str:
        """Return a sentence with the value and the level before."""
        if self.form == "not finite":
            return f"the {self.quantity} of step {self.step} is not finite; the steps before were at {self.level:.4g}"
        over = f" over {self.num_steps} steps" if self.num_steps > 1 else ""
        verb = "jumped" if self.form == "jump" else "rose"
        return (
            f"the {self.quantity} {verb} from {self.level:.4g} to {self.value:.4g} in step {self.step}{over}, "
            f"{self.deviations:.1f} deviations"
        )


class SpikeDetector:
    """Detects spikes in the losses and gradient norms of a run, step by step, in less than 0.1 ms per step."""

    def __init__(self, rule: SpikeRule) -> None:
        self._loss = _Series(rule, weight=1.0, above_lowest=True)
        self._norm = _Series(rule, weight=_NORM_WEIGHT, above_lowest=False)

    @property
    def is_calm(self) -> bool:
        """Whether neither series is close to a spike, so that the current state is safe to roll back to."""
        return self._loss.is_calm and self._norm.is_calm

    def add(self, step: int, loss: float, gradient_norm: float | None) -> Spike | None:
        """Add the values of a step; return a spike of the loss, else a spike of the gradient norm, else None.

        `gradient_norm` is the norm before clipping, or None if it was not measured.
        """
        loss_spike = self._loss.add(step, "loss", loss)
        norm_spike = None if gradient_norm is None else self._norm.add(step, "gradient norm", gradient_norm)
        return loss_spike or norm_spike

    def reset_sums(self) -> None:
        """Set the sums of deviations to 0, after a roll-back or a change of the learning rate."""
        self._loss.reset_sums()
        self._norm.reset_sums()


class FirstSpikes:
    """Finds spikes like `SpikeDetector`, but returns only the first of several spikes less than half a window apart."""

    def __init__(self, rule: SpikeRule) -> None:
        self._detector, self._min_distance, self._last_step = SpikeDetector(rule), rule.window / 2, -math.inf

    def add(self, step: int, loss: float, norm: float | None) -> Spike | None:
        """Add a step, and return its spike if it is the first of its group."""
        spike = self._detector.add(step, loss, norm)
        if spike is None:
            return None
        is_first, self._last_step = step - self._last_step > self._min_distance, step
        return spike if is_first else None


def spikes_of(values: Iterable[tuple[int, float, float | None]], rule: SpikeRule) -> list[Spike]:
    """Return the spikes of a finished run from its (step, loss, gradient norm) values.

    Of several spikes less than half a window apart, only the first is returned.
    """
    first_spikes = FirstSpikes(rule)
    return [spike for value in values if (spike := first_spikes.add(*value)) is not None]


class _Series:
    """The recent logarithms of one quantity, and the sums of its deviations, each multiplied by `weight`.

    With `above_lowest`, deviations are from the lowest level so far instead of the current level.
    """

    def __init__(self, rule: SpikeRule, *, weight: float, above_lowest: bool) -> None:
        self._rule = rule
        self._weight = weight
        self._above_lowest = above_lowest
        self._window: deque[float] = deque(maxlen=rule.window)
        self._lowest = (math.inf, _FLOOR)
        self._num_levels = 0
        self._first = 0.0
        self._early: list[float] | None = [] if above_lowest else None
        self._start = math.inf
        self._sums = dict.fromkeys(_SHIFTS, 0.0)
        self._lengths = dict.fromkeys(_SHIFTS, 0)
        self.is_calm = True

    def add(self, step: int, quantity: Quantity, value: float) -> Spike | None:
        """Add a value; return its spike, or None."""
        rule = self._rule
        if not math.isfinite(value):
            self.is_calm = False
            level = math.exp(median(self._window)) if self._window else math.nan
            return Spike(step, quantity, "not finite", value, level, math.inf, 1)
        log = math.log(max(value, _MIN_VALUE))
        early = self._early_rise(step, quantity, log)
        if len(self._window) < rule.least:
            self._window.append(log if early is None else math.log(_EARLY_FACTORS[0] * early.level))
            self._first = math.exp(median(list(self._window)[:_NUM_FIRST]))
            self.is_calm = early is None
            return early
        level, deviation = level_and_deviation(self._window)
        # Limit outliers, so that they do not raise the level.
        self._window.append(min(log, level + _MAX_DEVIATIONS * deviation))
        if self._above_lowest:
            level, deviation = self._above_chance(level, deviation)
        deviations = (log - level) / deviation
        num_steps = self._add_up(deviations * self._weight)
        self.is_calm = self.is_calm and early is None
        if early is not None:
            return early
        if (
            not num_steps
            or deviations <= 0.0
            or (self._above_lowest and deviation > _NEAR_ZERO and not self._lost_progress(value, level))
        ):
            return None
        form: Form = "jump" if num_steps == 1 else "rise"
        return Spike(step, quantity, form, value, math.exp(level), deviations, num_steps)

    def _early_rise(self, step: int, quantity: Quantity, log: float) -> Spike | None:
        """Return an early rise of a loss, or None; after `window` steps there is none."""
        if self._early is None:
            return None
        self._early.append(log)
        logs, last = self._early, self._early[-_NUM_FIRST:]
        if len(logs) >= self._rule.window:
            self._early = None
        self._start = min(self._start, logs[0] if len(logs) < _NUM_FIRST else median(last))
        if len(logs) < _NUM_FIRST:
            return None
        bends = [abs(a - 2.0 * b + c) for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        # Second differences have no linear trend, and root 6 times the deviation of independent values.
        deviation = max(_FLOOR, _TO_DEVIATION * median(bends) / math.sqrt(6.0))
        least, most = map(math.log, _EARLY_FACTORS)
        noise = _EARLY_DEVIATIONS * (1.0 + _EARLY_CAUTION / len(bends)) * deviation
        limit = self._start + max(least, min(noise, most))
        if min(log, median(last)) <= limit or not self._lost_progress(math.exp(log), self._start):
            return None
        level = math.exp(self._start)
        num_steps = sum(each > limit for each in last)
        return Spike(step, quantity, "rise", math.exp(log), level, (log - self._start) / deviation, num_steps)

    def _above_chance(self, level: float, deviation: float) -> tuple[float, float]:
        """Return the lowest level so far, corrected for chance (otherwise it would fall forever), and its scatter."""
        self._num_levels += 1
        self._lowest = min(self._lowest, (level, deviation))
        deviation = max(deviation, self._lowest[1])
        error = deviation * math.sqrt(math.pi / 2 / (len(self._window) // 2))  # of a median of normal values
        num_errors = _CHANCE_GROWTH * max(0.0, math.log(self._num_levels / _CHANCE_START))
        return min(level, self._lowest[0] + num_errors * error), deviation

    def _lost_progress(self, value: float, level: float) -> bool:
        lowest = math.exp(level)
        return value > lowest + _MIN_LOST_FRACTION * (self._first - lowest)

    def reset_sums(self) -> None:
        """Set the sums of deviations to 0."""
        self._sums = dict.fromkeys(_SHIFTS, 0.0)
        self._lengths = dict.fromkeys(_SHIFTS, 0)

    def _add_up(self, deviations: float) -> int:
        """Add a deviation to the sums; return the number of steps of a spike, or 0 if there is none."""
        is_jump, num_steps, worst = deviations > _JUMP, 0, 0.0
        for shift in _SHIFTS:
            total = self._sums[shift] = max(0.0, self._sums[shift] + min(deviations, _MAX_DEVIATIONS) - shift)
            self._lengths[shift] = self._lengths[shift] + 1 if total else 0
            worst = max(worst, total * shift / self._rule.strictness)
            if total * shift > self._rule.strictness and not num_steps:
                num_steps = self._lengths[shift]
        self.is_calm = worst < 1.0 / 2.0 and not is_jump
        return 1 if is_jump else num_steps


def level_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of the newer half, and the robust standard deviation of all values about their trend.

    `values` (at least 2) are in step order; the standard deviation is at least 0.05. The trend is the line through the
    medians of both halves. It is subtracted for the deviation but not extrapolated for the level: a loss falls more and
    more slowly, and would exceed its own trend.
    """
    number = len(values) // 2
    ordered = list(values)
    older, newer = ordered[:number], ordered[number:]
    level = median(newer)
    slope = (level - median(older)) * 2 / len(ordered)
    middle = number + (len(newer) - 1) / 2
    distances = [abs(value - level - slope * (index - middle)) for index, value in enumerate(ordered)]
    return level, max(_FLOOR, _TO_DEVIATION * median(distances))


SpikeAction = Literal["warn", "lower", "roll_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeWatch:
    """Settings for the detection of spikes and the reaction. All ranks see the same numbers, so they react alike.

    A roll-back restores weights, buffers, optimizer state and averaged weights only. Step count, schedule and data
    continue, so the samples of the undone steps are skipped and no sample counts twice (as in Chowdhery et al. 2022,
    arXiv 2204.02311, section 5.1, which resumed after a spike with other data).

    On a CPU, the loss and gradient norm of a step are checked after the step; on an accelerator one step later, to
    avoid waiting for the device.

    Args:
        action: "warn" only warns; "lower" also multiplies the learning rate by `lower_to` permanently; "roll_back"
            restores an earlier state and warms the rate up again from near 0, and after a second spike within 100 steps
            also multiplies the rate by `lower_to` permanently. "roll_back" also reacts to a loss or gradient that is
            not finite, which otherwise ends the run.
        rule: the thresholds for a spike.
        lower_to: factor for the learning rate, above 0 and at most 1; 1 never lowers it permanently.
        warm_up_steps: steps of the warm-up after a roll-back.
        keep_every: steps between the states that a roll-back can restore; the newest two are kept. During a spike no
            state is added.
        keep_on: "device", or "cpu" if the device has no memory for two more copies of weights and optimizer state.
        max_actions: maximum number of times the rate is lowered; after that the watch only warns, and a loss that is
            not finite ends the run.

    Raises:
        UserError: an argument is invalid.
    """

    action: SpikeAction = "warn"
    rule: SpikeRule = field(default_factory=SpikeRule)
    lower_to: float = 0.5
    warm_up_steps: int = 20
    keep_every: int = 20
    keep_on: Literal["device", "cpu"] = "device"
    max_actions: int = 10

    def __post_init__(self) -> None:
        """Check each argument."""
        for name, choices in (("action", get_args(SpikeAction)), ("keep_on", ("device", "cpu"))):
            if getattr(self, name) not in choices:
                message = f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}."
                raise UserError(message)
        if not 0.0 < self.lower_to <= 1.0:
            message = f"lower_to={self.lower_to!r} must be above 0 and at most 1."
            raise UserError(message)
        checked_int("warm_up_steps", self.warm_up_steps, minimum=0)
        checked_int("keep_every", self.keep_every)
        checked_int("max_actions", self.max_actions)


def spike_watch(given: SpikeWatch | SpikeAction) -> SpikeWatch:
    """Return the argument of `Engine(spikes=...)` as a `SpikeWatch`; a bare action uses the defaults.

    Raises:
        UserError: the action is unknown.
    """
    return given if isinstance(given, SpikeWatch) else SpikeWatch(action=given)
