"""Replace BatchNorm by layers that normalise each sample separately."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.dtypes import widened
from anybatch.core.torch_internals import BatchNormBase
from anybatch.errors import UserError
from anybatch.norms.layers import batch_norms, refuse_unfit_layers

Kind = Literal["group_norm", "layer_norm", "rms_norm"]
_MOST_GROUPS, _FEWEST_VALUES = 32, 4


@dataclass(frozen=True, slots=True)
class Replaced:
    """A model without BatchNorm.

    Attributes:
        model: a copy; the original is unchanged.
        layers: the old and the new layer, by name.
        retrain: a sentence: how many layers must be trained again, and why.
    """

    model: nn.Module
    layers: Mapping[str, str]
    retrain: str


class ChannelRMSNorm(nn.Module):
    """Divides a sample by the root of the mean square of its values; then applies weight and bias per channel.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; here over channels and positions, like
    GroupNorm with one group, and with the bias of BatchNorm.

    Args:
        num_channels: length of the second axis.
        eps: added to the mean square.
        affine: whether the layer has weight and bias.
    """

    def __init__(self, num_channels: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_channels)) if affine else None

    def forward(self, values: Float[Tensor, "samples channels *rest"]) -> Float[Tensor, "samples channels *rest"]:
        """Normalise each sample separately."""
        axes = list(range(1, values.dim()))
        wide = widened(values)
        output = (wide * (wide.square().mean(axes, keepdim=True) + self.eps).rsqrt()).to(values.dtype)
        if self.weight is None or self.bias is None:
            return output
        shape = (1, -1, *[1] * (values.dim() - 2))
        return output * self.weight.view(shape) + self.bias.view(shape)


def replaced(model: nn.Module, kind: Kind, *, num_groups: int | None = None) -> Replaced:
    """Return a copy of a model with other layers instead of BatchNorm; call it before the optimizer is built.

    Each new layer copies weight, bias and eps of the old one. Running statistics have no counterpart.

    Args:
        model: the model; it is not changed.
        kind: "group_norm", "layer_norm" (one group: over channels and positions), or "rms_norm" (the same without the
            mean).
        num_groups: for "group_norm"; None uses the largest number up to 32 with 4 or more channels per group.

    Raises:
        UserError: an unknown kind, or a number of groups that does not divide a layer's channels.

    Source: Wu and He, "Group Normalization", 2018, for the 32 groups.
    """
    makers: Mapping[str, Callable[[BatchNormBase], nn.Module]] = {
        "group_norm": lambda old: nn.GroupNorm(
            num_groups or default_groups(old.num_features), old.num_features, eps=old.eps, affine=old.affine
        ),
        "layer_norm": lambda old: nn.GroupNorm(1, old.num_features, eps=old.eps, affine=old.affine),
        "rms_norm": lambda old: ChannelRMSNorm(old.num_features, eps=old.eps, affine=old.affine),
    }
    if kind not in makers:
        message = f"{kind=} must be one of {', '.join(map(repr, makers))}."
        raise UserError(message)
    refuse_unfit_layers(model, num_ranks=1, frozen=False)
    made = copy.deepcopy(model)
    replaced_by: dict[str, str] = {}
    new_of: dict[nn.Module, nn.Module] = {}  # a layer that is used twice stays one layer
    for name, old in batch_norms(made).items():
        if kind == "group_norm" and num_groups is not None and old.num_features % num_groups:
            message = f"{num_groups=} must divide the {old.num_features} channels of layer {name!r}; None chooses."
            raise UserError(message)
        new_of[old] = _with_parameters_of(makers[kind](old), old)
        replaced_by[name] = f"{type(old).__name__}({old.num_features}) -> {_described(new_of[old])}"
    # Duplicates too: a layer under two names has to be replaced under both.
    for name, old_layer in list(made.named_modules(remove_duplicate=False)):
        # The model itself is in no other module; if it is a layer, it is replaced below.
        if name and old_layer in new_of:
            outer, _, own_name = name.rpartition(".")
            setattr(made.get_submodule(outer), own_name, new_of[old_layer])
    retrain = (
        f"{len(replaced_by)} layers: weight, bias and eps were copied where a layer has them, and running statistics "
        "dropped. The new layers compute another function, so a trained model needs more training, and a learning "
        "rate tuned for BatchNorm may be too high."
    )
    return Replaced(new_of.get(made, made), replaced_by, retrain)


def default_groups(num_channels: int) -> int:
    """Return the largest number of groups up to 32 that divides the channels with 4 or more in each; otherwise 1."""
    fits = [g for g in range(1, _MOST_GROUPS + 1) if num_channels % g == 0 and num_channels // g >= _FEWEST_VALUES]
    return max(fits, default=1)


def _with_parameters_of(new: nn.Module, old: BatchNormBase) -> nn.Module:
    with torch.no_grad():
        for name, own in new.named_parameters():
            theirs = getattr(old, name)
            if theirs is not None:  # BatchNorm(bias=False) only has a weight
                own.data = theirs.detach().clone()
                own.requires_grad_(theirs.requires_grad)
    return new.train(old.training)


def _described(layer: nn.Module) -> str:
    if isinstance(layer, nn.GroupNorm):
        return f"GroupNorm({layer.num_groups}, {layer.num_channels})"
    return f"{type(layer).__name__}({getattr(layer, 'num_channels', '')})"
