"""Replace BatchNorm, or recompute its running statistics after training."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anybatch.core.tensors import widened, widest_dtype
from anybatch.core.torch_internals import BatchNormBase
from anybatch.errors import DataError, UserError
from anybatch.norms.layers import ModelCall, Ranks, batch_norms, refuse_unfit_layers, tracking_layers

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
        raise UserError(message, code="unknown_kind")
    refuse_unfit_layers(model, num_ranks=1, frozen=False)
    made = copy.deepcopy(model)
    replaced_by: dict[str, str] = {}
    new_of: dict[nn.Module, nn.Module] = {}  # a layer that is used twice stays one layer
    for name, old in batch_norms(made).items():
        if kind == "group_norm" and num_groups is not None and old.num_features % num_groups:
            message = f"{num_groups=} must divide the {old.num_features} channels of layer {name!r}; None chooses."
            raise UserError(message, code="not_a_divisor")
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


class _StopForward(BaseException):  # not an Exception, which a model might catch
    """Ends a forward after the last call of the layer whose input is measured."""


def recompute_statistics(
    model: nn.Module, batches: Iterable[Any], *, call: ModelCall | None = None, ranks: Ranks | None = None
) -> tuple[str, ...]:
    """Replace the running statistics of all BatchNorm layers by exact ones of the data, and return the layers' names.

    Afterwards each layer's mean and unbiased variance are the statistics of its inputs over all batches, with the
    layers before it normalising by *their* new statistics: the inputs in evaluation. So the result does not depend on
    the cut of the data, unlike one pass in train mode. Layers are processed one after the other, each with one pass
    over the data, up to that layer, and one pass finds their order.

    Args:
        model: the trained model; its modes, its parameters and everything but the statistics are unchanged.
        batches: can be iterated over several times, such as a list or a loader without shuffling; on several ranks each
            rank's own part.
        call: runs the model on a batch; None: `model(batch)`.
        ranks: the other ranks, see `anybatch.norms.layers.Ranks`; None for one rank.

    Returns:
        The names of the layers, in the order of their first call.

    Raises:
        DataError: batches that can be iterated over only once, or none.

    Source: Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3, for its use; their method is one pass.
    """
    ranks = ranks or Ranks()
    if isinstance(batches, Iterator):
        message = f"{type(batches).__name__} can be iterated over once only, but every layer takes a pass. Give a list."
        raise DataError(message)
    run = call or (lambda module, batch: module(batch))
    layers = {name: layer for name, layer in tracking_layers(model).items() if isinstance(layer, BatchNormBase)}
    with _in_evaluation_mode(model), torch.no_grad():
        order = _order(model, layers, batches, run)
        for name, num_calls in order.items():
            mean, variance = _statistics(model, layers[name], batches, run, num_calls=num_calls, ranks=ranks)
            layer = layers[name]
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
    return tuple(order)


@contextmanager
def _in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _order(
    model: nn.Module, layers: dict[str, BatchNormBase], batches: Iterable[Any], run: ModelCall
) -> dict[str, int]:
    """Return the number of calls of each layer in one forward, in the order of the first calls."""
    found: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            found[name] = found.get(name, 0) + 1

        return hook

    handles: list[RemovableHandle] = [layer.register_forward_hook(counting(name)) for name, layer in layers.items()]
    try:
        for batch in batches:
            run(model, batch)
            return found
    finally:
        for handle in handles:
            handle.remove()
    message = "statistics need at least one batch, and `batches` is empty."
    raise DataError(message)


def _statistics(
    model: nn.Module, layer: BatchNormBase, batches: Iterable[Any], run: ModelCall, *, num_calls: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of a layer's inputs over all batches and ranks."""
    assert layer.running_mean is not None
    dtype = widest_dtype(layer.running_mean.device)
    count = torch.zeros(1, dtype=dtype, device=layer.running_mean.device)
    mean, squares = (torch.zeros_like(layer.running_mean, dtype=dtype) for _ in range(2))
    calls = 0

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal calls
        values = args[0].transpose(0, 1).flatten(1).to(dtype)  # (channels, samples and positions)
        variance, own = torch.var_mean(values, 1, correction=0)
        _merge((count, mean, squares), values.shape[1], own, variance * values.shape[1])
        calls += 1
        if calls == num_calls:
            calls = 0
            raise _StopForward

    handle = layer.register_forward_pre_hook(hook)
    try:
        for batch in batches:
            # A forward that called the layer less often than the first one has left its count.
            calls = 0
            try:
                run(model, batch)
            except _StopForward:
                continue
    finally:
        handle.remove()
    # Two messages: squares are taken around the mean of all ranks, from the first one.
    total = ranks.sum(torch.cat([count, mean * count]))
    overall = total[1:] / total[:1]
    squares = ranks.sum(squares + (mean - overall).square() * count)
    return overall, squares / (total[:1] - 1).clamp(min=1)


def _merge(into: tuple[Tensor, Tensor, Tensor], count: int, mean: Tensor, squares: Tensor) -> None:
    """Merge the statistics of some values into others, in place.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    total_count, total_mean, total_squares = into
    distance = mean - total_mean
    together = total_count + count
    total_squares += squares + distance.square() * total_count * count / together
    total_mean += distance * count / together
    total_count += count
