"""Chapter 7: the learning rate that belongs to a batch size, and how it moves from step to step.

Changing the effective batch size changes the noise of every update, so a learning rate found at one size is wrong at
another. A *rule* carries it over, once, before training; a *schedule* then multiplies it with a factor per step.
The unit of every schedule is the optimizer step; samples and epochs are turned into steps once, beforehand.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from anybatch.core.geometry import ceil_div
from anybatch.core.whole_numbers import checked_int
from anybatch.errors import BatchSizeError, ParameterError, UserError

ScalingRule = Literal["linear", "sqrt", "none"]
Schedule = Callable[[int], float]
"""Optimizer step, from 0 on, to the factor its learning rate is multiplied with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRate:
    """A learning rate carried from one batch size to another, with what goes with it. Print it in a banner.

    Attributes:
        rule: the rule that was applied.
        base_batch_size: samples per optimizer step that the base values were found with.
        effective_batch_size: samples per optimizer step that the other values are for.
        factor: learning rate / base learning rate.
        base_learning_rate: the learning rate before.
        learning_rate: the learning rate to use.
        base_betas: decay rates of an Adam-like optimizer's running averages before; empty for other optimizers.
        betas: the same, to use.
        base_eps: the optimizer's eps before; None where it has none that belongs to the rule.
        eps: the same, to use.
    """

    rule: ScalingRule
    base_batch_size: int
    effective_batch_size: int
    factor: float
    base_learning_rate: float
    learning_rate: float
    base_betas: tuple[float, ...] = ()
    betas: tuple[float, ...] = ()
    base_eps: float | None = None
    eps: float | None = None

    def __str__(self) -> str:
        """Return what changed in one line: `lr 0.0032 = 0.0001 x 32 (linear, 256 / 8 samples)`."""
        sizes = f"{self.effective_batch_size} / {self.base_batch_size} samples"
        rates = f"lr {self.learning_rate:.6g} = {self.base_learning_rate:.6g} x {self.factor:.6g}"
        line = f"{rates} ({self.rule}, {sizes})"
        if self.betas != self.base_betas:
            line += f", betas {_listed(self.base_betas)} -> {_listed(self.betas)}"
        if self.eps is not None and self.eps != self.base_eps:
            line += f", eps {self.base_eps:.6g} -> {self.eps:.6g}"
        return line


def scale_rate(
    learning_rate: float,
    *,
    base_batch_size: int,
    effective_batch_size: int,
    rule: ScalingRule,
    betas: Sequence[float] = (),
    eps: float | None = None,
) -> ScaledRate:
    """Carry `learning_rate` from `base_batch_size` to `effective_batch_size`, by `rule`.

    With kappa = effective / base:

    - "linear": lr x kappa. Goyal et al. 2017, arXiv 1706.02677, for SGD with or without momentum, together with a
      warm-up that starts at the base rate (`WarmUp(num_steps=..., start_factor=1 / kappa)`) and takes about 5 epochs.
    - "sqrt": lr x sqrt(kappa), betas -> betas ** kappa, eps -> eps / sqrt(kappa). Malladi et al. 2022, arXiv
      2205.10287, for Adam and RMSprop. They give 1 - beta -> kappa (1 - beta), which leaves [0, 1) for large kappa;
      beta ** kappa agrees to first order, never leaves it, and holds the half-life of the average in samples
      (Marek et al. 2025, arXiv 2507.07101). For SGD, which has no betas, it holds the variance of the update
      (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741): a careful choice that under-shoots.
    - "none": everything as it is.

    Limits: all hold only where gradient noise dominates, well below the critical batch size (McCandlish et al. 2018,
    arXiv 1812.06162); from there on they over-shoot. The betas are exact to first order in kappa (1 - beta). The
    weight decay coefficient is not part of any rule here.

    Args:
        learning_rate: found with `base_batch_size`.
        base_batch_size: samples per optimizer step, over all ranks, that `learning_rate` was found with.
        effective_batch_size: samples per optimizer step, over all ranks, to train with.
        rule: "linear", "sqrt" or "none".
        betas: decay rates per step of an Adam-like optimizer.
        eps: what an Adam-like optimizer adds to the root of its second moment.

    Raises:
        BatchSizeError: a batch size below 1.
        UserError: a rule that does not exist, or a learning rate that is negative or not finite.
    """
    checked_int("base_batch_size", base_batch_size, error=BatchSizeError)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    _check_not_negative("learning_rate", learning_rate)
    if rule not in get_args(ScalingRule):
        message = f"{rule=} is not a scaling rule; use one of {_listed(get_args(ScalingRule))}."
        raise UserError(message)
    kappa = effective_batch_size / base_batch_size
    factor = {"linear": kappa, "sqrt": math.sqrt(kappa), "none": 1.0}[rule]
    is_sqrt = rule == "sqrt"
    return ScaledRate(
        rule=rule,
        base_batch_size=base_batch_size,
        effective_batch_size=effective_batch_size,
        factor=factor,
        base_learning_rate=learning_rate,
        learning_rate=learning_rate * factor,
        base_betas=tuple(betas),
        betas=tuple(beta**kappa if is_sqrt else beta for beta in betas),
        base_eps=eps,
        eps=eps / factor if eps is not None and is_sqrt else eps,
    )


def default_rule(optimizer: torch.optim.Optimizer) -> ScalingRule:
    """Return the rule that has a source for this type of optimizer: "linear" for SGD, "sqrt" for Adam and its kin.

    SGD-like is `torch.optim.SGD` and what derives from it: Goyal et al. 2017, measured to a batch of 8192 on ImageNet.
    Adam-like is RMSprop and whatever has both `betas` and one `eps` per group: Malladi et al. 2022 derive and measure
    Adam and RMSprop (without momentum); the others follow by analogy only. Optimizers that find their own rate
    (D-Adaptation, Prodigy) look like Adam and want "none".

    Raises:
        UserError: no rule is known for this type.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return "linear"
    if all(_decay_name(optimizer, group) is not None for group in optimizer.param_groups):
        return "sqrt"
    message = (
        f"no scaling rule is known for {type(optimizer).__name__}, which is neither SGD-like nor Adam-like. "
        f"Name one of {_listed(get_args(ScalingRule))} as rule."
    )
    raise UserError(message)


def scale_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    base_batch_size: int,
    effective_batch_size: int,
    rule: ScalingRule | None = None,
) -> tuple[ScaledRate, ...]:
    """Scale the learning rate of every parameter group in place; return one description per group, to be shown.

    An Adam-like optimizer's betas (RMSprop's alpha) and eps change with "sqrt", see `scale_rate`. Nothing else does:
    not momentum, and not the weight decay coefficient. Where weight decay is decoupled, torch multiplies it with the
    learning rate, so the decay of a step follows the learning rate.

    Call it once, on a new optimizer: a second call scales again, and groups added later are not scaled.

    Args:
        optimizer: not yet under a scheduler.
        base_batch_size: samples per optimizer step, over all ranks, that its learning rates were found with.
        effective_batch_size: samples per optimizer step, over all ranks, to train with.
        rule: None for `default_rule(optimizer)`.

    Raises:
        BatchSizeError: a batch size below 1.
        ParameterError: the optimizer is under a scheduler, which would undo the scaling with its next step.
        UserError: a rule that does not exist, or none given and none known for this type of optimizer.
    """
    # Every scheduler of torch computes from initial_lr, which it copied before the scaling.
    if any("initial_lr" in group for group in optimizer.param_groups):
        message = (
            f"this {type(optimizer).__name__} is already under a learning-rate scheduler (its groups have an "
            "initial_lr), which would undo the scaling. Scale first, then make the scheduler."
        )
        raise ParameterError(message)
    chosen = default_rule(optimizer) if rule is None else rule
    names = [_decay_name(optimizer, group) for group in optimizer.param_groups]
    # All groups are computed before the first is written, so that a refusal leaves the optimizer as it was.
    scaled = tuple(
        scale_rate(
            float(group["lr"]),
            base_batch_size=base_batch_size,
            effective_batch_size=effective_batch_size,
            rule=chosen,
            betas=() if name is None else tuple(float(beta) for beta in _as_tuple(group[name])),
            eps=None if name is None else float(group["eps"]),
        )
        for group, name in zip(optimizer.param_groups, names, strict=True)
    )
    for group, name, rate in zip(optimizer.param_groups, names, scaled, strict=True):
        _write(group, name, rate)
    return scaled


class BoundedSchedule(Protocol):
    """A schedule that knows when it is over; None for never. Make them with the classes below, join them by `then`."""

    @property
    def num_steps(self) -> int | None:
        """Steps until it is over."""
        ...

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """From `start_factor` to 1 in a straight line over `num_steps` steps, then 1.

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
        num_steps: steps until the next schedule of a `then`; None for the rest of the run.
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
    """From 1 to `floor` in a straight line over `num_steps` steps, then `floor`.

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
class Sequential:
    """Schedules one after another, each from its own step 0. Made by `then`."""

    parts: tuple[BoundedSchedule, ...]

    @property
    def num_steps(self) -> int | None:
        """Steps of all parts together; None if the last has no end."""
        last = self.parts[-1].num_steps
        return None if last is None else sum(_bounded(part) for part in self.parts)

    def __call__(self, step: int, /) -> float:
        """Return the factor of `step`: of the part it falls into, or of the last one."""
        checked_int("step", step, least=0)
        starts = list(itertools.accumulate((_bounded(part) for part in self.parts[:-1]), initial=0))
        number = sum(start <= step for start in starts) - 1
        return self.parts[number](step - starts[number])


def then(first: BoundedSchedule, *rest: BoundedSchedule) -> Sequential:
    """Join schedules: the second begins, at its own step 0, where the first is over, and so on.

    `then(WarmUp(num_steps=500, start_factor=0.1), Cosine(num_steps=9500, floor=0.1))`.

    Args:
        first: a schedule with a number of steps, after which the next one begins.
        rest: the schedules after it, in order; the last one need not end.

    Raises:
        UserError: a schedule that never ends stands before another one.
    """
    parts = itertools.chain.from_iterable(
        part.parts if isinstance(part, Sequential) else (part,) for part in (first, *rest)
    )
    joined = Sequential(tuple(parts))
    # Refused here, where the schedule is written, and not in the middle of a run.
    for part in joined.parts[:-1]:
        _bounded(part)
    return joined


def steps_of_samples(num_samples: int, *, effective_batch_size: int) -> int:
    """Return the optimizer steps in which `num_samples` samples have been seen, over all ranks, rounded up.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_samples` is negative.
    """
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    checked_int("num_samples", num_samples, least=0)
    return ceil_div(num_samples, effective_batch_size)


def steps_of_epochs(num_epochs: float, *, samples_per_epoch: int, effective_batch_size: int) -> int:
    """Return the optimizer steps of `num_epochs` epochs, rounded up; the last, smaller batch of an epoch is a step.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_epochs` or `samples_per_epoch` is negative.
    """
    _check_not_negative("num_epochs", num_epochs)
    steps_per_epoch = steps_of_samples(samples_per_epoch, effective_batch_size=effective_batch_size)
    exact = num_epochs * steps_per_epoch
    nearest = round(exact)
    # 0.1 epochs of 30 steps are 3 steps, though 0.1 * 30 is a little more in floating point
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact)


def attach_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule) -> LambdaLR:
    """Return the torch scheduler that multiplies each group's learning rate with `schedule(step)`.

    Call its `step` once after each optimizer step; its last_epoch counts optimizer steps. Its state holds the step and
    the base rates but not the schedule, which comes from the code: it loads with `weights_only=True`, and a resumed run
    follows the schedule it was given.

    Args:
        optimizer: its groups' learning rates are the factor 1.
        schedule: function (step) -> factor, from step 0 on.
    """
    # LambdaLR saves, and on loading overwrites, the __dict__ of a callable object: a partial's is empty
    return LambdaLR(optimizer, partial(schedule))


def _decay_name(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Return under which name an Adam-like optimizer keeps the decay of its averages; None for other optimizers."""
    # Adafactor's eps is a pair, for which no rule is known.
    if not isinstance(group.get("eps"), int | float):
        return None
    if "betas" in group:
        return "betas"
    return "alpha" if isinstance(optimizer, torch.optim.RMSprop) else None


def _as_tuple(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 (a number or several, as the optimizer keeps it)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _write(group: dict[str, Any], name: str | None, rate: ScaledRate) -> None:
    # As the kind of number that it was: capturable optimizers keep the rate in a tensor.
    group["lr"] = _like(group["lr"], rate.learning_rate)
    if name is None or rate.rule != "sqrt":
        return
    old = group[name]
    betas = tuple(_like(beta, new) for beta, new in zip(_as_tuple(old), rate.betas, strict=True))
    # RMSprop keeps one decay rate, Adam a pair.
    group[name] = betas if isinstance(old, tuple | list) else betas[0]
    group["eps"] = rate.eps


def _like(old: float | torch.Tensor, new: float) -> float | torch.Tensor:
    """Return `new` as the kind of number `old` is; a new tensor, since groups may share the old one."""
    return old.new_tensor(new) if isinstance(old, torch.Tensor) else new


def _progress(step: int, num_steps: int) -> float:
    """Return how much of `num_steps` is over before `step`, from 0 to 1."""
    checked_int("step", step, least=0)
    # In this order, so that 0 steps need no division.
    return 1.0 if step >= num_steps else step / num_steps


def _bounded(part: BoundedSchedule) -> int:
    if part.num_steps is None:
        message = f"{part} has num_steps=None, so nothing can follow it. Give it num_steps, or put it last."
        raise UserError(message)
    return part.num_steps


def _check_not_negative(name: str, value: float) -> None:
    # NaN fails every comparison, and so is refused as well.
    if not 0.0 <= value < math.inf:
        message = f"{name}={value} must be a finite number that is not negative."
        raise UserError(message)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        message = f"{name}={value} must be from 0 to 1."
        raise UserError(message)


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values)
