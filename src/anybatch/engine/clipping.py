"""Clipping: once per effective batch, on the summed gradient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils import get_total_norm

from anybatch.errors import UserError


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


def clip_policy(clip: "Clip | float | None") -> Clip | None:
    """Return the policy; a plain number is the largest norm."""
    return ClipByNorm(float(clip)) if isinstance(clip, (int, float)) else clip


def total_norm(gradients: Sequence[torch.Tensor]) -> Float[Tensor, ""]:
    """Return the 2-norm over all gradients together, on the device, in the gradients' own precision."""
    norm = get_total_norm([_values(gradient) for gradient in gradients])
    # The norm of sharded gradients (DTensors, whose module takes a second and a half to import) is itself sharded.
    gather = getattr(norm, "full_tensor", None)
    return norm if gather is None else gather()


@torch.no_grad()
def clip_gradients(gradients: Sequence[torch.Tensor], norm: Float[Tensor, ""] | None, clip: Clip) -> None:
    """Clip in place. `norm` is the total norm where it has been measured already."""
    values = [_values(gradient) for gradient in gradients]
    if isinstance(clip, ClipByNorm):
        assert norm is not None
        # As torch.nn.utils.clip_grad_norm_ does, small term included; 1 where nothing is to be clipped, so that the
        # host need not know whether.
        torch._foreach_mul_(values, (clip.max_norm / (norm + 1e-6)).clamp(max=1.0))
    else:
        torch._foreach_clamp_min_(values, -clip.max_value)
        torch._foreach_clamp_max_(values, clip.max_value)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient  # noqa: SLF001 (coalesced; shares its memory)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        message = f"{name}={value} must be above 0. Leave clip out to clip nothing."
        raise UserError(message)
