"""Chapter 25: learning-rate schedules, on top of the rate from its scaling rule.

A schedule multiplies the rate by a factor in each step. Every schedule counts optimizer steps; durations in samples or
epochs are converted to steps beforehand.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from anybatch.core.batch_ramp import BatchRamp
from anybatch.core.geometry import ceil_div
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import BatchSizeError, UserError

Schedule = Callable[[int], float]
"""Function (optimizer step, from 0 on) -> the factor of the learning rate."""


class BoundedSchedule(Protocol):
    """A schedule with a known number of steps: one of the classes below, or several joined by `join_schedules`."""

    @property
    def num_steps(self) -> int | None:
        """Steps until it ends; None if it never does."""
        ...

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Linear from `start_factor` to 1 over `num_steps` steps, then 1.

    Args:
        num_steps: steps before the factor is 1. See `steps_of_samples` and `steps_of_epochs`.
        start_factor: factor of step 0, from 0 to 1. With 0 the first step changes nothing. Goyal et al. 2017 start
            at the rate of the base batch size, 1 / `ScaledRate.factor`.
    """

    num_steps: int
    start_factor: float

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("start_factor", self.start_factor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.start_factor + (1.0 - self.start_factor) * _progress(step, self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same factor in every step.

    Args:
        factor: not negative.
        num_steps: steps until the next schedule begins, if joined with others; None if it never ends.
    """

    factor: float = 1.0
    num_steps: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.num_steps is not None:
            checked_int("num_steps", self.num_steps, least=0)
        _check_not_negative("factor", self.factor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        checked_int("step", step, least=0)
        return self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """From 1 to `floor` along half a cosine over `num_steps` steps, then `floor`.

    Source: Loshchilov and Hutter 2016, arXiv 1608.03983, without restarts. Unlike torch's `CosineAnnealingLR`, it
    does not rise again after the last step.

    Args:
        num_steps: steps before the factor is `floor`.
        floor: last factor, from 0 to 1.
    """

    num_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("floor", self.floor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return self.floor + (1.0 - self.floor) * (1.0 + math.cos(math.pi * _progress(step, self.num_steps))) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDecay:
    """Linear from 1 to `floor` over `num_steps` steps, then `floor`.

    Args:
        num_steps: steps before the factor is `floor`.
        floor: last factor, from 0 to 1.
    """

    num_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Check the arguments."""
        checked_int("num_steps", self.num_steps, least=0)
        _check_fraction("floor", self.floor)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        return 1.0 - (1.0 - self.floor) * _progress(step, self.num_steps)


@dataclass(frozen=True, slots=True)
class SequentialSchedule:
    """Schedules one after another, each counting from its own step 0; made by `join_schedules`."""

    parts: tuple[BoundedSchedule, ...]

    @property
    def num_steps(self) -> int | None:
        """Steps of all parts together; None if the last part never ends."""
        last = self.parts[-1].num_steps
        return None if last is None else sum(_required_num_steps(part) for part in self.parts)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step` from its part; after the end, from the last part."""
        checked_int("step", step, least=0)
        starts = list(itertools.accumulate((_required_num_steps(part) for part in self.parts[:-1]), initial=0))
        number = sum(start <= step for start in starts) - 1
        return self.parts[number](step - starts[number])


def join_schedules(first: BoundedSchedule, *rest: BoundedSchedule) -> SequentialSchedule:
    """Return one schedule that runs these one after another, each from its own step 0 (like torch's `SequentialLR`).

    `join_schedules(WarmUp(num_steps=500, start_factor=0.1), Cosine(num_steps=9500, floor=0.1))`.

    Args:
        first: the first schedule; the next one begins after its `num_steps`.
        rest: the schedules after it, in order; only the last one may have `num_steps=None`.

    Raises:
        UserError: a schedule that never ends is not the last.
    """
    parts = itertools.chain.from_iterable(
        part.parts if isinstance(part, SequentialSchedule) else (part,) for part in (first, *rest)
    )
    joined = SequentialSchedule(tuple(parts))
    # Check here and not in the middle of a run.
    for part in joined.parts[:-1]:
        _required_num_steps(part)
    return joined


def steps_of_samples(num_samples: int, *, effective_batch_size: int | BatchRamp) -> int:
    """Return the number of optimizer steps that `num_samples` samples take, over all ranks, rounded up.

    A warm-up in samples: `WarmUp(num_steps=steps_of_samples(50_000, effective_batch_size=256), start_factor=0.1)`. Keep
    the number of samples when the batch grows: the SDE of Malladi et al. 2022 measures time in samples, not steps.

    Args:
        num_samples: counted from the beginning of a run.
        effective_batch_size: samples of one step, or a ramp of them; smaller batches at the end of an epoch are
            ignored.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_samples` is negative.
    """
    if isinstance(effective_batch_size, BatchRamp):
        return effective_batch_size.steps_of(num_samples)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    checked_int("num_samples", num_samples, least=0)
    return ceil_div(num_samples, effective_batch_size)


def steps_of_epochs(num_epochs: float, *, samples_per_epoch: int, effective_batch_size: int) -> int:
    """Return the number of optimizer steps of `num_epochs` epochs, rounded up; a smaller last batch is also a step.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_epochs` or `samples_per_epoch` is negative.
    """
    _check_not_negative("num_epochs", num_epochs)
    steps_per_epoch = steps_of_samples(samples_per_epoch, effective_batch_size=effective_batch_size)
    exact = num_epochs * steps_per_epoch
    nearest = round(exact)
    # 0.1 epochs of 30 steps are 3 steps, although 0.1 * 30 > 3 in floating point
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact)


def attach_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule) -> LambdaLR:
    """Return a torch scheduler that multiplies each group's learning rate by `schedule(step)`.

    Call its `step` once after each optimizer step; its `last_epoch` counts optimizer steps. Its state_dict has the step
    and the base rates, so it loads with `weights_only=True`. It does not have the schedule: a resumed run uses the
    schedule that is passed here.

    Args:
        optimizer: its groups' learning rates are multiplied by the factor.
        schedule: function (step) -> factor, from step 0 on.
    """
    # LambdaLR saves and restores the __dict__ of a callable object; the __dict__ of a partial is empty
    return LambdaLR(optimizer, partial(schedule))


def _progress(step: int, num_steps: int) -> float:
    """Return the fraction of `num_steps` that is complete before `step`, from 0 to 1."""
    checked_int("step", step, least=0)
    # In this order, so that 0 steps need no division.
    return 1.0 if step >= num_steps else step / num_steps


def _required_num_steps(part: BoundedSchedule) -> int:
    """Return the steps of a schedule that another one follows; refuse one that never ends."""
    if part.num_steps is None:
        message = f"{part} has num_steps=None, so nothing can follow it. Give it num_steps, or put it last."
        raise UserError(message)
    return part.num_steps


def _check_not_negative(name: str, value: float) -> None:
    # NaN fails every comparison, so it is refused too.
    if not 0.0 <= value < math.inf:
        message = f"{name}={value} must be a finite number that is not negative."
        raise UserError(message)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        message = f"{name}={value} must be from 0 to 1."
        raise UserError(message)
