"""Chapter 27: when a loss or a gradient norm is not what the steps before it would lead one to expect.

Both are looked at as logarithms, since a loss that doubles is as alarming at 0.1 as at 10, and by medians, since what
is looked for must not move what it is measured with (Hampel 1974, JASA 69: median and median absolute deviation bear
almost half of the values being wrong). One value says little, and a few in a row say much: what deviates is added up
(Page 1954, Biometrika 41: cumulative sums).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from anybatch.core.whole_numbers import checked_int
from anybatch.errors import UserError

_TO_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation, where values are normal."""
_SHIFTS = (1.0, 1.5, 2.0, 3.0)
"""What is taken off each deviation before it is added up: small ones find slow changes, large ones fast ones."""
_MOST_DEVIATIONS = 6.0
"""What one value adds at most; a single bad value must not stand for many."""
_NEAR_ZERO = 0.4
"""Deviation of the logarithm from which on a loss is taken to be near zero: there a few hard samples make a batch."""
_GIVEN_BACK = 0.15
"""Near zero, what part of all that was learned a loss has to give back."""
_NUM_FIRST = 3
"""Losses at the beginning, of which the median stands for a model that has learned nothing."""
_LEAST_VALUE = 1e-30
"""For the logarithm of a loss or gradient of zero."""

Quantity = Literal["loss", "gradient norm"]
Form = Literal["not finite", "jump", "rise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeRule:
    """What counts as a spike. The defaults were found on small runs, see `benchmarks/spike_watch.py`.

    A value deviates by as many deviations as its logarithm lies above the level: the median of the newer half of the
    window for a gradient norm, and the lowest such level so far for a loss, which has no business above it. The
    deviation is the scatter of the window about its trend.

    A *jump* is one value that deviates by more than `jump`. A *rise* is a sum: for a shift k of 1 to 3 deviations, each
    value adds its deviation less k, never below 0 in all, and more than `strictness` / k is too much. For normal values
    that happens by chance in about exp(-2 strictness) of the steps.

    A loss that is near zero scatters by more than half of itself, and as a ratio any hard sample is a spike: there it
    must also have given back a seventh of what was learned since the beginning.

    Args:
        window: steps that level and scatter are taken from.
        least: steps before anything can be a spike.
        jump: deviations.
        strictness: higher is later and more certain.
        norm_weight: what a deviation of a gradient norm counts for. Norms have heavier tails than losses.
        floor: least deviation, of the logarithm: what is smaller is no scatter worth acting on.

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
                raise UserError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """A value that is not what the steps before it would lead one to expect. Printed, it is a sentence without its end.

    Attributes:
        step: its number, from 0 on.
        quantity: what was looked at.
        form: not finite, a jump of one value, or a rise over several.
        value: what it is.
        level: what the steps before were at; NaN where there were none.
        deviations: how far the logarithms of both are apart; infinite for a value that is not finite.
        num_steps: steps over which it has come about.
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
    """Looks at the losses and gradient norms of a run, step by step. A step takes less than 0.1 ms of the host.

    Args:
        rule: what counts as a spike.
    """

    def __init__(self, rule: SpikeRule) -> None:
        self._loss = _Series(rule, weight=1.0, above_lowest=True)
        self._norm = _Series(rule, weight=rule.norm_weight, above_lowest=False)

    @property
    def is_calm(self) -> bool:
        """Whether nothing that was looked at last is on its way to a spike: a state to go back to can be kept."""
        return self._loss.is_calm and self._norm.is_calm

    def look(self, step: int, loss: float, gradient_norm: float | None) -> Spike | None:
        """Take the values of a step, and return the spike that they are, the loss first; None where they are ordinary.

        Args:
            step: its number.
            loss: of the effective batch.
            gradient_norm: before clipping; None where it was not measured.
        """
        of_loss = self._loss.look(step, "loss", loss)
        of_norm = None if gradient_norm is None else self._norm.look(step, "gradient norm", gradient_norm)
        return of_loss or of_norm

    def begin_again(self) -> None:
        """Forget what has been added up: the run was changed from outside, by a roll-back or another learning rate."""
        self._loss.begin_again()
        self._norm.begin_again()


def spikes_of(values: Iterable[tuple[int, float, float | None]], rule: SpikeRule) -> list[Spike]:
    """Return the spikes of a run that is over, of each episode the first.

    An episode ends when values have been ordinary for as long as half a window.

    Args:
        values: step, loss and gradient norm, in the order of the steps.
        rule: what counts as a spike.
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
    """The logarithms of one quantity.

    Args:
        rule: what counts as a spike.
        weight: what a deviation counts for.
        above_lowest: deviations are from the lowest level so far.
    """

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
        """Take a value; return the spike that it is."""
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
        # What is far above does not make the level rise with it.
        self._window.append(min(log, level + _MOST_DEVIATIONS * deviation))
        if self._above_lowest:
            self._lowest = min(self._lowest, (level, deviation))
            level, deviation = self._lowest[0], max(deviation, self._lowest[1])
        deviations = (log - level) / deviation
        num_steps = self._add_up(deviations * self._weight)
        if not num_steps or (self._above_lowest and deviation > _NEAR_ZERO and not self._gave_back(value, level)):
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

    def _gave_back(self, value: float, level: float) -> bool:
        lowest = math.exp(level)
        return value > lowest + _GIVEN_BACK * (self._first - lowest)

    def begin_again(self) -> None:
        """Forget what has been added up."""
        self._sums = dict.fromkeys(_SHIFTS, 0.0)
        self._lengths = dict.fromkeys(_SHIFTS, 0)

    def _add_up(self, deviations: float) -> int:
        """Return over how many steps a spike has come about; 0 where there is none."""
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
    """Return the median of the newer half, and the scatter of all about their trend, at least `floor`.

    The trend is the line through the medians of both halves. It is taken out of the scatter and not prolonged: a loss
    falls ever more slowly, and would lie above its own trend.

    Args:
        values: at least 2, in the order of their steps.
        floor: least deviation.
    """
    number = len(values) // 2
    every = list(values)
    older, newer = every[:number], every[number:]
    level = median(newer)
    slope = (level - median(older)) * 2 / len(every)
    middle = number + (len(newer) - 1) / 2
    rest = [abs(value - level - slope * (place - middle)) for place, value in enumerate(every)]
    return level, max(floor, _TO_DEVIATION * median(rest))
