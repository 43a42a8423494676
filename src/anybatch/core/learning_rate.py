"""Scale learning rates with the batch size.

Changing the effective batch size changes the noise of every update, so a learning rate tuned at one size is wrong at
another. A *scaling rule* converts the rate once, before training; a schedule then multiplies it by a factor per step.
The range of each rule was measured on small networks: `benchmarks/learning_rate_rules.py`, docs/learning_rates.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from anybatch.core.geometry import checked_int
from anybatch.core.run_config import ScalingRule
from anybatch.core.schedules import check_not_negative
from anybatch.errors import BatchSizeError, ParameterError, UserError

Memory = Literal["samples", "steps"]
"""The unit in which running averages of gradients (momentum, betas) keep their length when the batch size changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRate:
    """A learning rate scaled from one batch size to another, with betas and eps; `str` gives one line."""

    rule: ScalingRule  # the scaling rule that was applied
    base_batch_size: int  # samples per optimizer step for which the base values were tuned
    effective_batch_size: int  # samples per optimizer step for which the values are scaled
    factor: float  # learning rate / base learning rate
    base_learning_rate: float  # the learning rate before scaling
    learning_rate: float  # the scaled learning rate
    base_betas: tuple[float, ...] = ()  # betas of an Adam-like optimizer before scaling; empty for other optimizers
    betas: tuple[float, ...] = ()  # the scaled betas
    base_eps: float | None = None  # eps before scaling; None without an eps that a rule scales
    eps: float | None = None  # the scaled eps
    base_momentum: float = 0.0  # momentum of SGD or RMSprop before scaling; 0 for none
    momentum: float = 0.0  # the scaled momentum

    def __str__(self) -> str:
        """Return the changes in one line: `lr 0.0032 = 0.0001 x 32 (linear, 256 / 8 samples)`."""
        sizes = f"{self.effective_batch_size} / {self.base_batch_size} samples"
        rates = f"lr {self.learning_rate:.6g} = {self.base_learning_rate:.6g} x {self.factor:.6g}"
        line = f"{rates} ({self.rule}, {sizes})"
        if self.betas != self.base_betas:
            line += f", betas {_comma_separated(self.base_betas)} -> {_comma_separated(self.betas)}"
        if self.momentum != self.base_momentum:
            line += f", momentum {self.base_momentum:.6g} -> {self.momentum:.6g}"
        if self.eps is not None and self.eps != self.base_eps:
            line += f", eps {self.base_eps:.6g} -> {self.eps:.6g}"
        decay = scaled_weight_decay(1.0, self) if self.factor else 1.0
        return line + f", weight decay as before (x {decay:.3g} keeps AdamW's average)" * bool(
            self.betas and decay != 1.0
        )


def scale_rate(
    learning_rate: float,
    *,
    base_batch_size: int,
    effective_batch_size: int,
    rule: ScalingRule,
    betas: Sequence[float] = (),
    eps: float | None = None,
    momentum: float = 0.0,
    memory: Memory | None = None,
) -> ScaledRate:
    """Scale `learning_rate` from `base_batch_size` to `effective_batch_size` by `rule`.

    With kappa = effective / base:

    - "linear": lr x kappa. Goyal et al. 2017, arXiv 1706.02677, for SGD with or without momentum, together with a
      warm-up that starts at the base rate (`WarmUp(num_steps=..., start_factor=1 / kappa)`) and takes about 5 epochs.
    - "sqrt": lr x sqrt(kappa), betas -> betas ** kappa, eps -> eps / sqrt(kappa). Malladi et al. 2022, arXiv
      2205.10287, for Adam and RMSprop. They give 1 - beta -> kappa (1 - beta); beta ** kappa agrees to first order,
      stays in [0, 1), and keeps the half-life of the average in samples (Marek et al. 2025, arXiv 2507.07101). For SGD
      the rule keeps the variance of the update (Krizhevsky 2014, arXiv 1404.5997): a cautious choice.
    - "none": nothing is scaled.

    "linear" and "none" keep the length of running averages of gradients in steps, and "sqrt" of averages with betas in
    samples. `memory="samples"` raises every decay rate, including momentum, to the power kappa, which keeps the
    half-life in samples. In torch's form (u = momentum u + g, p -= lr u), a gradient g moves p by g x lr / (1 -
    momentum) in total, so lr is then also multiplied by (1 - momentum ** kappa) / (1 - momentum).

    Limits: the rules are valid only while gradient noise dominates, well below the critical batch size (McCandlish et
    al. 2018, arXiv 1812.06162); above it they give too large a rate, and Adam's best rate falls (see `adam_gain`). The
    betas are exact to first order in kappa (1 - beta). For weight decay see `scaled_weight_decay`.

    Args:
        learning_rate: the rate that was tuned for `base_batch_size`.
        base_batch_size: samples per optimizer step, over all ranks, for which `learning_rate` was tuned.
        effective_batch_size: samples per optimizer step, over all ranks, to train with.
        rule: "linear", "sqrt" or "none".
        betas: an Adam-like optimizer's decay rates of its running averages, per step.
        eps: an Adam-like optimizer's eps, added to the root of the second moment.
        momentum: of SGD or RMSprop, in torch's form; 0 for none.
        memory: the unit in which the length of running averages is kept; None for the rule's default.

    Raises:
        BatchSizeError: a batch size below 1.
        UserError: an unknown rule or memory, or a learning rate that is negative or not finite.
    """
    checked_int("base_batch_size", base_batch_size, error=BatchSizeError)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    check_not_negative("learning_rate", learning_rate)
    if rule not in get_args(ScalingRule):
        message = f"{rule=} is not a scaling rule; use one of {_comma_separated(get_args(ScalingRule))}."
        raise UserError(message, code="unknown_rule")
    if memory not in (None, *get_args(Memory)):
        message = f"{memory=} must be one of {_comma_separated(get_args(Memory))}, or None for the rule's default."
        raise UserError(message, code="unknown_option")
    kappa = effective_batch_size / base_batch_size
    rule_factor = {"linear": kappa, "sqrt": math.sqrt(kappa), "none": 1.0}[rule]
    is_sqrt = rule == "sqrt"
    keeps_samples = memory == "samples" or (memory is None and is_sqrt)
    # By default no rule changes momentum.
    scaled_momentum = momentum**kappa if memory == "samples" else momentum
    factor = rule_factor if scaled_momentum == momentum else rule_factor * (1.0 - scaled_momentum) / (1.0 - momentum)
    return ScaledRate(
        rule=rule,
        base_batch_size=base_batch_size,
        effective_batch_size=effective_batch_size,
        factor=factor,
        base_learning_rate=learning_rate,
        learning_rate=learning_rate * factor,
        base_betas=tuple(betas),
        betas=tuple(beta**kappa if keeps_samples else beta for beta in betas),
        base_eps=eps,
        eps=eps / rule_factor if eps is not None and is_sqrt else eps,
        base_momentum=momentum,
        momentum=scaled_momentum,
    )


def default_rule(optimizer: torch.optim.Optimizer) -> ScalingRule:
    """Return the published rule for this type of optimizer: "linear" for SGD, "sqrt" for Adam-like optimizers.

    "linear" is for `torch.optim.SGD` and its subclasses (Goyal et al. 2017, up to a batch of 8192 on ImageNet). "sqrt"
    is for RMSprop and every optimizer with `betas` and one `eps` per group: derived for Adam and RMSprop, an analogy
    for others. Optimizers that estimate the rate themselves (D-Adaptation, Prodigy) look like Adam, but need "none".

    Raises:
        UserError: no rule is known for this type of optimizer.
    """
    if isinstance(optimizer, torch.optim.SGD):
        return "linear"
    if all(_betas_key(optimizer, group) is not None for group in optimizer.param_groups):
        return "sqrt"
    rules = _comma_separated(get_args(ScalingRule))
    message = f"no scaling rule is known for {type(optimizer).__name__}. Pass one of {rules} as rule."
    raise UserError(message, code="no_rule_known")


def scale_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    base_batch_size: int,
    effective_batch_size: int,
    rule: ScalingRule | None = None,
    memory: Memory | None = None,
) -> tuple[ScaledRate, ...]:
    """Scale the learning rate of every parameter group in place; return the changes, one `ScaledRate` per group.

    "sqrt" also scales an Adam-like optimizer's betas (RMSprop's alpha) and eps, see `scale_rate`. Momentum is scaled
    only with memory="samples", and the weight decay coefficient never (see `scaled_weight_decay`).

    Call it once, on a new optimizer: a second call scales again, and groups added later are not scaled.

    Args:
        optimizer: an optimizer that has no scheduler yet.
        base_batch_size: samples per optimizer step, over all ranks, for which its learning rates were tuned.
        effective_batch_size: samples per optimizer step, over all ranks, to train with.
        rule: None for `default_rule(optimizer)`.
        memory: the unit in which the length of running averages is kept; None for the rule's default.

    Raises:
        BatchSizeError: a batch size below 1.
        ParameterError: the optimizer has a scheduler, which would undo the scaling with its next step.
        UserError: an unknown rule, or `rule` is None and this type of optimizer has no default rule.
    """
    # A scheduler of torch computes rates from initial_lr, which it has copied before this scaling.
    if any("initial_lr" in group for group in optimizer.param_groups):
        message = f"{type(optimizer).__name__} already has a scheduler, which would undo the scaling. Scale first."
        raise ParameterError(message, code="has_scheduler")
    chosen = default_rule(optimizer) if rule is None else rule
    betas_keys = [_betas_key(optimizer, group) for group in optimizer.param_groups]
    # Compute all groups before changing the first, so that an error leaves the optimizer unchanged.
    scaled = tuple(
        scale_rate(
            float(group["lr"]),
            base_batch_size=base_batch_size,
            effective_batch_size=effective_batch_size,
            rule=chosen,
            betas=() if key is None else tuple(float(beta) for beta in _as_tuple(group[key])),
            eps=None if key is None else float(group["eps"]),
            momentum=_momentum_of(optimizer, group),
            memory=memory,
        )
        for group, key in zip(optimizer.param_groups, betas_keys, strict=True)
    )
    for group, key, rate in zip(optimizer.param_groups, betas_keys, scaled, strict=True):
        _update_group(group, key, rate)
    return scaled


def noise_gain(noise_scale: float, *, base_batch_size: int, effective_batch_size: int) -> float:
    """Return the learning-rate gain of a larger batch: r = (1 + B_noise / base) / (1 + B_noise / effective).

    The gain is 1 without gradient noise, and tends to kappa = effective / base if noise dominates. It equals AdaScale's
    gain (Johnson et al. 2020, arXiv 2007.05105) and the ratio of two rates of McCandlish et al. 2018 (arXiv 1812.06162)
    for SGD, eta_max / (1 + B_noise / B).

    Limits: both papers derive it for SGD without momentum. For Adam-like optimizers see `adam_gain`.

    Args:
        noise_scale: the gradient noise scale B_noise = tr(Sigma) / |G|^2, in samples.
        base_batch_size: samples per step for which the learning rate was tuned.
        effective_batch_size: samples per step to train with.

    Raises:
        BatchSizeError: a batch size below 1.
        UserError: a noise scale that is negative or not finite.
    """
    checked_int("base_batch_size", base_batch_size, error=BatchSizeError)
    checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    check_not_negative("noise_scale", noise_scale)
    return (1.0 + noise_scale / base_batch_size) / (1.0 + noise_scale / effective_batch_size)


def adam_gain(noise_scale: float, *, base_batch_size: int, effective_batch_size: int) -> float:
    """Return the learning-rate gain of a larger batch for Adam: `noise_gain` / sqrt(kappa).

    It is sqrt(kappa) far below B_noise, largest at B_noise, and falls above it: Li et al. 2024, arXiv 2405.14578, find
    a best rate proportional to 1 / (sqrt(B_noise / B) + sqrt(B / B_noise)).

    Limits: derived for the sign of the gradient, whose noise scale `GradientNoise` does not measure; arguments and
    errors are those of `noise_gain`.
    """
    gain = noise_gain(noise_scale, base_batch_size=base_batch_size, effective_batch_size=effective_batch_size)
    return gain / math.sqrt(effective_batch_size / base_batch_size)


def scaled_weight_decay(weight_decay: float, rate: ScaledRate) -> float:
    """Return the decay that keeps the samples over which AdamW averages weights: decay x kappa / rate factor.

    AdamW averages over B / (lr x decay) samples. Its best value depends on the data and hardly on the batch (Wang and
    Aitchison 2024, arXiv 2405.13698); at a fixed rate the best decay grows linearly with B (Bergsma et al. 2025, arXiv
    2505.13738). Limits: decoupled decay, equal numbers of samples, and batches below the critical size.
    """
    return weight_decay * rate.effective_batch_size / rate.base_batch_size / rate.factor


def _betas_key(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Return the key of an Adam-like optimizer's decay rates, "betas" or "alpha"; None for other optimizers."""
    # Adafactor's eps is a pair of numbers, for which no rule exists.
    if not isinstance(group.get("eps"), int | float):
        return None
    if "betas" in group:
        return "betas"
    return "alpha" if isinstance(optimizer, torch.optim.RMSprop) else None


def _momentum_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    """Return the momentum of an optimizer with updates u = momentum u + g; 0 for other optimizers."""
    has_form = isinstance(optimizer, torch.optim.SGD | torch.optim.RMSprop)
    return float(group.get("momentum", 0.0)) if has_form else 0.0


def _as_tuple(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 (a number or several, as the optimizer keeps it)
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _update_group(group: dict[str, Any], betas_key: str | None, rate: ScaledRate) -> None:
    # Keep the type of the rate: capturable optimizers store it in a tensor.
    group["lr"] = _same_type(group["lr"], rate.learning_rate)
    if rate.momentum != rate.base_momentum:
        group["momentum"] = rate.momentum
    if betas_key is None or (rate.betas, rate.eps) == (rate.base_betas, rate.base_eps):
        return
    old = group[betas_key]
    betas = tuple(_same_type(beta, new) for beta, new in zip(_as_tuple(old), rate.betas, strict=True))
    # RMSprop has one decay rate, Adam a pair.
    group[betas_key] = betas if isinstance(old, tuple | list) else betas[0]
    group["eps"] = rate.eps


def _same_type(old: float | torch.Tensor, new: float) -> float | torch.Tensor:
    """Return `new` as a float or tensor, like `old`; a new tensor, since groups may share the old one."""
    return old.new_tensor(new) if isinstance(old, torch.Tensor) else new


def _comma_separated(values: Sequence[object]) -> str:
    """Return values as text, floats with six significant digits."""
    return ", ".join(f"{value:.6g}" if isinstance(value, float) else repr(value) for value in values)
