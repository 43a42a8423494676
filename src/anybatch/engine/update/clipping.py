"""Gradient clipping, once per effective batch, on the summed gradient: of all parameters or by parameter group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from anybatch.core.torch_internals import clamp_each, dense_values, multiply_each
from anybatch.core.whole_numbers import refuse_unless
from anybatch.errors import UserError
from anybatch.parallel.strategy import ParameterLayout


@dataclass(frozen=True, slots=True)
class ClipByNorm:
    """Scale all gradients down together so that their 2-norm is at most `max_norm`.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.
    """

    max_norm: float

    def __post_init__(self) -> None:
        _check_positive("max_norm", self.max_norm)


@dataclass(frozen=True, slots=True)
class ClipByValue:
    """Limit every gradient element to plus or minus `max_value`."""

    max_value: float

    def __post_init__(self) -> None:
        _check_positive("max_value", self.max_value)


Clip = ClipByNorm | ClipByValue


@dataclass(frozen=True, slots=True)
class ClipByGroup:
    """Clip each parameter group of the optimizer separately: `policies[j]` is for `optimizer.param_groups[j]`."""

    policies: tuple[Clip | None, ...]


ClipPolicy = Clip | ClipByGroup
ClipArgument = Clip | float | Sequence[Clip | float | None] | None


def clip_policy(clip: ClipArgument) -> ClipPolicy | None:
    """Return the policy; a plain number is the maximum norm, a sequence has one policy per parameter group."""
    if isinstance(clip, Sequence):
        return ClipByGroup(tuple(_policy_of_group(policy) for policy in clip))
    return _policy_of_group(clip)


def refuse_groups(clip: ClipPolicy | None, optimizer: Optimizer) -> None:
    """Raise a `UserError` if the number of policies is not the number of parameter groups."""
    if isinstance(clip, ClipByGroup) and len(clip.policies) != len(optimizer.param_groups):
        message = (
            f"clip has {len(clip.policies)} policies, one per parameter group, but the optimizer has "
            f"{len(optimizer.param_groups)} groups. Give one for each; None clips nothing."
        )
        raise UserError(message)


def clip_gradients(
    gradients: Sequence[torch.Tensor | None],
    norm: Float[Tensor, ""] | None,
    clip: ClipPolicy,
    in_groups: Callable[[Sequence[torch.Tensor | None]], Sequence[Sequence[torch.Tensor]]],
    layout: ParameterLayout,
) -> None:
    """Clip in place. The plain loop: `for policy, group in zip(clip, optimizer.param_groups): clip_grad_norm_(...)`.

    Args:
        gradients: gradient of each parameter; None for one that no rank used.
        norm: the norm of all gradients, if it has been measured already.
        clip: the policy.
        in_groups: returns the gradients that are not None, by parameter group of the optimizer.
        layout: distribution of the gradients over ranks.
    """
    # Each group needs its norm; the norm of all gradients is not enough.
    if isinstance(clip, ClipByGroup):
        for policy, group in zip(clip.policies, in_groups(gradients), strict=True):
            if policy is not None and group:
                _clip(group, layout.norm(group) if isinstance(policy, ClipByNorm) else None, policy, layout)
        return
    present = [gradient for gradient in gradients if gradient is not None]
    if present:
        _clip(present, norm, clip, layout)


@torch.no_grad()
def _clip(
    gradients: Sequence[torch.Tensor], norm: Float[Tensor, ""] | None, clip: Clip, layout: ParameterLayout
) -> None:
    values = [dense_values(layout.local(gradient)) for gradient in gradients]
    if isinstance(clip, ClipByNorm):
        assert norm is not None
        # Like torch.nn.utils.clip_grad_norm_, including the small term. Without clipping the factor is 1, so that the
        # host need not wait for the norm.
        multiply_each(values, (clip.max_norm / (norm + 1e-6)).clamp(max=1.0))
    else:
        clamp_each(values, clip.max_value)


def _policy_of_group(clip: Clip | float | None) -> Clip | None:
    if clip is None or isinstance(clip, ClipByNorm | ClipByValue):
        return clip
    _check_positive("clip", clip)
    return ClipByNorm(float(clip))


def _check_positive(name: str, value: float) -> None:
    refuse_unless(_is_positive(value), name, value, "a number above 0, or None to clip nothing")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0  # infinity clips nothing
