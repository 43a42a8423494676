"""Chapter 7: how the learning rate is scaled with the batch size, and scheduled from step to step.

Changing the effective batch size changes the noise of every update, so a learning rate tuned at one size is wrong at
another. A *scaling rule* converts it once, before training; a *schedule* then multiplies it by a factor in each step.
Every schedule counts optimizer steps; durations in samples or epochs are converted to steps beforehand.
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
"""Function (optimizer step, from 0 on) -> the factor that the learning rate is multiplied by in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRate:
    """A learning rate scaled from one batch size to another, with betas and eps. Printed, it is one line.

    Attributes:
        rule: the scaling rule that was applied.
        base_batch_size: samples per optimizer step that the base values were tuned with.
        effective_batch_size: samples per optimizer step that the scaled values are for.
        factor: learning rate / base learning rate.
        base_learning_rate: the learning rate before scaling.
        learning_rate: the scaled learning rate.
        base_betas: betas of an Adam-like optimizer before scaling; empty for other optimizers.
        betas: the scaled betas.
        base_eps: the optimizer's eps before scaling; None for an optimizer without one that a rule scales.
        eps: the scaled eps.
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
            line += f", betas {_comma_separated(self.base_betas)} -> {_comma_separated(self.betas)}"
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
    """Scale `learning_rate` from `base_batch_size` to `effective_batch_size` by `rule`.

    With kappa = effective / base:

    - "linear": lr x kappa. Goyal et al. 2017, arXiv 1706.02677, for SGD with or without momentum, together with a
      warm-up that starts at the base rate (`WarmUp(num_steps=..., start_factor=1 / kappa)`) and takes about 5 epochs.
    - "sqrt": lr x sqrt(kappa), betas -> betas ** kappa, eps -> eps / sqrt(kappa). Malladi et al. 2022, arXiv
      2205.10287, for Adam and RMSprop. They give 1 - beta -> kappa (1 - beta), which leaves [0, 1) for large kappa;
      beta ** kappa agrees to first order, never leaves it, and keeps the half-life of the average in samples
      (Marek et al. 2025, arXiv 2507.07101). For SGD, which has no betas, it keeps the variance of the update
      (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017, arXiv 1705.08741): a cautious choice, lower than linear.
    - "none": nothing is scaled.

    Limits: the rules are valid only where gradient noise dominates, well below the critical batch size (McCandlish et
    al. 2018, arXiv 1812.06162); above it they give too large a rate. The betas are exact to first order in
    kappa (1 - beta). No rule scales the weight decay coefficient.

    Args:
        learning_rate: the rate that was tuned with `base_batch_size`.
        base_batch_size: samples per optimizer step, over all ranks, that `learning_rate` was tuned with.
        effective_batch_size: samples per optimizer step, over all ranks, to train with.
        rule: "linear", "sqrt" or "none".
        betas: an Adam-like optimizer's decay rates of its running averages, per step.
        eps: an Adam-like optimizer's eps, added to the root of the second moment.

    Raises:
        BatchSizeError: a batch size below 1.
        UserError: a rule that does not exist, or a learning rate that is negative or not finite.
    """
    checked_int("base_batch_size", base_batch_size, error=BatchSizeError)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    _check_not_negative("learning_rate", learning_rate)
    if rule not in get_args(ScalingRule):
        message = f"{rule=} is not a scaling rule; use one of {_comma_separated(get_args(ScalingRule))}."
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
    """Return the published rule for this type of optimizer: "linear" for SGD, "sqrt" for Adam-like ones.

    SGD-like are `torch.optim.SGD` and its subclasses: Goyal et al. 2017, measured up to a batch of 8192 on ImageNet.
    Adam-like are RMSprop and every optimizer with `betas` and one `eps` per group: Malladi et al. 2022 derive and
    measure the rule for Adam and RMSprop (without momentum); for the others it is an analogy. Optimizers that estimate
    the learning rate themselves (D-Adaptation, Prodigy) look like Adam, but need "none".

    Raises:
        UserError: no rule is known for this type.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return "linear"
    if all(_betas_key(optimizer, group) is not None for group in optimizer.param_groups):
        return "sqrt"
    message = (
        f"no scaling rule is known for {type(optimizer).__name__}, which is neither SGD-like nor Adam-like. "
        f"Name one of {_comma_separated(get_args(ScalingRule))} as rule."
    )
    raise UserError(message)


def scale_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    base_batch_size: int,
    effective_batch_size: int,
    rule: ScalingRule | None = None,
) -> tuple[ScaledRate, ...]:
    """Scale the learning rate of every parameter group in place; return what changed, one `ScaledRate` per group.

    "sqrt" also scales an Adam-like optimizer's betas (RMSprop's alpha) and eps, see `scale_rate`. Momentum and the
    weight decay coefficient are never scaled. Where weight decay is decoupled, torch multiplies it by the learning
    rate, so the decay of a step follows the learning rate.

    Call it once, on a new optimizer: a second call scales again, and groups added later are not scaled.

    Args:
        optimizer: an optimizer without a scheduler so far.
        base_batch_size: samples per optimizer step, over all ranks, that its learning rates were tuned with.
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
    betas_keys = [_betas_key(optimizer, group) for group in optimizer.param_groups]
    # All groups are computed before the first is changed, so that an error leaves the optimizer unchanged.
    scaled = tuple(
        scale_rate(
            float(group["lr"]),
            base_batch_size=base_batch_size,
            effective_batch_size=effective_batch_size,
            rule=chosen,
            betas=() if key is None else tuple(float(beta) for beta in _as_tuple(group[key])),
            eps=None if key is None else float(group["eps"]),
        )
        for group, key in zip(optimizer.param_groups, betas_keys, strict=True)
    )
    for group, key, rate in zip(optimizer.param_groups, betas_keys, scaled, strict=True):
        _update_group(group, key, rate)
    return scaled


class BoundedSchedule(Protocol):
    """A schedule that knows its number of steps: one of the classes below, or several joined by `join_schedules`."""

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
        num_steps: steps until the next schedule begins, where it is joined with others; None if it never ends.
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
        """Return the factor of `step`, by the part that it falls into; after the end, by the last part."""
        checked_int("step", step, least=0)
        starts = list(itertools.accumulate((_required_num_steps(part) for part in self.parts[:-1]), initial=0))
        number = sum(start <= step for start in starts) - 1
        return self.parts[number](step - starts[number])


def join_schedules(first: BoundedSchedule, *rest: BoundedSchedule) -> SequentialSchedule:
    """Return one schedule that runs these one after another, each from its own step 0 (as torch's `SequentialLR`).

    `join_schedules(WarmUp(num_steps=500, start_factor=0.1), Cosine(num_steps=9500, floor=0.1))`.

    Args:
        first: the first schedule; its `num_steps` says when the next one begins.
        rest: the schedules after it, in order; only the last one may have `num_steps=None`.

    Raises:
        UserError: a schedule that never ends has another one after it.
    """
    parts = itertools.chain.from_iterable(
        part.parts if isinstance(part, SequentialSchedule) else (part,) for part in (first, *rest)
    )
    joined = SequentialSchedule(tuple(parts))
    # Checked here, where the schedule is made, and not in the middle of a run.
    for part in joined.parts[:-1]:
        _required_num_steps(part)
    return joined


def steps_of_samples(num_samples: int, *, effective_batch_size: int) -> int:
    """Return the number of optimizer steps that `num_samples` samples take, over all ranks, rounded up.

    Raises:
        BatchSizeError: `effective_batch_size` is below 1.
        UserError: `num_samples` is negative.
    """
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    checked_int("num_samples", num_samples, least=0)
    return ceil_div(num_samples, effective_batch_size)


def steps_of_epochs(num_epochs: float, *, samples_per_epoch: int, effective_batch_size: int) -> int:
    """Return the number of optimizer steps of `num_epochs` epochs, rounded up; an epoch's smaller last batch is a step.

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
    """Return a torch scheduler that multiplies each group's learning rate by `schedule(step)`.

    Call its `step` once after each optimizer step; its `last_epoch` counts optimizer steps. Its state_dict has the step
    and the base rates, but not the schedule, which comes from the code: it loads with `weights_only=True`, and a
    resumed run follows the schedule that it is given then.

    Args:
        optimizer: its groups' learning rates are multiplied by the factor.
        schedule: function (step) -> factor, from step 0 on.
    """
    # LambdaLR saves, and on loading overwrites, the __dict__ of a callable object: a partial's is empty
    return LambdaLR(optimizer, partial(schedule))


def _betas_key(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Return the key of an Adam-like optimizer's decay rates, "betas" or "alpha"; None for other optimizers."""
    # Adafactor's eps is a pair, for which no rule is known.
    if not isinstance(group.get("eps"), int | float):
        return None
    if "betas" in group:
        return "betas"
    return "alpha" if isinstance(optimizer, torch.optim.RMSprop) else None


def _as_tuple(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 (a number or several, as the optimizer keeps it)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _update_group(group: dict[str, Any], betas_key: str | None, rate: ScaledRate) -> None:
    # A number stays a number, and a tensor a tensor: capturable optimizers keep the rate in one.
    group["lr"] = _same_type(group["lr"], rate.learning_rate)
    if betas_key is None or rate.rule != "sqrt":
        return
    old = group[betas_key]
    betas = tuple(_same_type(beta, new) for beta, new in zip(_as_tuple(old), rate.betas, strict=True))
    # RMSprop keeps one decay rate, Adam a pair.
    group[betas_key] = betas if isinstance(old, tuple | list) else betas[0]
    group["eps"] = rate.eps


def _same_type(old: float | torch.Tensor, new: float) -> float | torch.Tensor:
    """Return `new` as a float or tensor, as `old` is; a new tensor, since groups may share the old one."""
    return old.new_tensor(new) if isinstance(old, torch.Tensor) else new


def _progress(step: int, num_steps: int) -> float:
    """Return the fraction of `num_steps` that is done before `step`, from 0 to 1."""
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
    # NaN fails every comparison, and so is refused as well.
    if not 0.0 <= value < math.inf:
        message = f"{name}={value} must be a finite number that is not negative."
        raise UserError(message)


def _check_fraction(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        message = f"{name}={value} must be from 0 to 1."
        raise UserError(message)


def _comma_separated(values: Sequence[object]) -> str:
    """Return values as text, floats with six significant digits."""
    return ", ".join(f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values)
