"""Find BatchNorm layers and modules that mix samples in other ways, and replace BatchNorm by layers that do not."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase, kept_buffers
from anybatch.core.tree import Batch, map_tensors, tensors_of
from anybatch.errors import CompositionError, ParameterError, UserError

Kind = Literal["group_norm", "layer_norm"]
_MAX_GROUPS, _MIN_CHANNELS_PER_GROUP = 32, 4


@dataclass(frozen=True, slots=True)
class Ranks:
    """The collectives for normalisation over ranks. The default is a single rank.

    Attributes:
        size: number of ranks.
        sum: replaces a small tensor on this rank's device by its sum over ranks, and returns it.
        max: returns the maximum of an integer over ranks.
    """

    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    max: Callable[[int], int] = lambda number: number


def batch_norms(modules: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorm layers of all types by name, in train and in evaluation mode."""
    return {name: module for name, module in modules.named_modules() if isinstance(module, BatchNormBase)}


def tracking_layers(modules: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorm layers with running statistics by name."""
    return {name: layer for name, layer in batch_norms(modules).items() if layer.running_mean is not None}


def check_supported_layers(modules: nn.Module, *, num_ranks: int, frozen: bool) -> None:
    """Raise an error for layers that no BatchNorm policy (`norms=`) supports.

    With `frozen`, BatchNorm layers normalise by their running statistics.
    """
    for name, layer in modules.named_modules():
        if isinstance(layer, InstanceNormBase) and layer.track_running_stats and not frozen:
            message = (
                f"layer {name!r} is a {type(layer).__name__} that tracks running statistics. They would be updated "
                "once per micro-batch, not once per effective batch. Use track_running_stats=False, the default."
            )
            raise CompositionError(message, code="instance_statistics")
    for name, module in batch_norms(modules).items():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            message = (
                f"layer {name!r} is a {type(module).__name__} that has no parameters before its first batch. Run the "
                "model on a batch once before you build the optimizer and the engine."
            )
            raise ParameterError(message, code="lazy_layer")
        if isinstance(module, nn.SyncBatchNorm) and num_ranks > 1 and not frozen:
            message = (
                f"layer {name!r} is a SyncBatchNorm, which cannot be used on {num_ranks} ranks. Each forward waits for "
                "all ranks, and would hang if ranks run different numbers of micro-batches. Use torch's BatchNorm "
                "layers with norms='sync', or norms='exact'."
            )
            raise CompositionError(message, code="synced_layer")


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def find_coupling_modules(modules: nn.Module, run: Callable[[], object], num_samples: int) -> dict[str, float]:
    """Return the innermost modules whose output for a sample depends on other samples, and the relative change.

    Only the last sample of the batch is changed. The relative change is the largest change in the outputs of all other
    samples, divided by the largest of these outputs. The caller sets the modes of the modules, and restores buffers and
    random state. `run` runs a forward over the whole batch.
    """
    with torch.no_grad():
        inputs = _inputs_of_modules(modules, run)
        names = {name for name, module in modules.named_modules() if module in inputs}
        changes: dict[str, float] = {}
        # Deepest first, so that a module is skipped if one of its submodules mixes samples.
        for name in sorted(names, key=lambda name: -name.count(".") - bool(name)):
            if any(_is_inside(inner, name) for inner in changes):
                continue
            module = modules.get_submodule(name)
            try:
                change = _coupling(module, inputs[module], num_samples)
            except RuntimeError:  # the inputs were recorded inside `torch.func.vmap`, and cannot be used outside
                continue
            if change:
                changes[name] = change
    return changes


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _inputs_of_modules(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, _Inputs]:
    """Return the arguments of each module's first call."""
    inputs: dict[nn.Module, _Inputs] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in inputs:  # recorded as copies, because a layer may change its input in place
            inputs[module] = map_tensors(args, _copy), map_tensors(kwargs, _copy)

    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules()
    ]
    try:
        with torch.enable_grad():  # a loss may compute gradients, such as a gradient penalty
            run()
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _coupling(module: nn.Module, inputs: _Inputs, num_samples: int) -> float:
    """Return the largest relative change in the outputs of all other samples if the last sample changes."""
    changed = map_tensors(inputs, lambda tensor: _with_other_last_sample(tensor, num_samples))
    # If this changes nothing, no input has a row for each sample.
    if all(torch.equal(before, after) for before, after in zip(tensors_of(inputs), tensors_of(changed), strict=True)):
        return 0.0
    outputs = _outputs(module, (inputs, inputs, changed))
    # If two equal calls differ, the module has state, such as a cache, and cannot be tested.
    if not outputs or _max_change(outputs[0], outputs[1], num_samples):
        return 0.0
    return _max_change(outputs[0], outputs[2], num_samples)


def _outputs(module: nn.Module, calls: Sequence[_Inputs]) -> list[list[Tensor]]:
    """Return the output of each call, with the same buffers and random numbers; an empty list if a call fails."""
    buffers, state = kept_buffers(module), torch.get_rng_state()
    outputs = []
    for args, kwargs in calls:
        torch.set_rng_state(state)
        buffers.restore()
        try:
            output = module(*map_tensors(args, torch.clone), **map_tensors(kwargs, torch.clone))
        except Exception:  # noqa: BLE001 (a module that cannot be called again cannot be tested)
            return []
        outputs.append(list(tensors_of(_in_a_tree(output))))
    return outputs


def _max_change(before: Sequence[Tensor], after: Sequence[Tensor], num_samples: int) -> float:
    return max((_relative_change(*pair, num_samples) for pair in zip(before, after, strict=False)), default=0.0)


def _in_a_tree(output: object) -> Batch:
    return output if isinstance(output, (Tensor, Mapping, tuple, list)) else (output,)


def _with_other_last_sample(tensor: Tensor, num_samples: int) -> Tensor:
    """Return the tensor with the rows of the last sample changed to other valid values."""
    if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % num_samples:
        return tensor
    rows = tensor.shape[0] // num_samples
    changed = tensor.clone()
    if tensor.is_floating_point():
        # Changes the values even if all samples are equal or zero.
        changed[-rows:] = tensor[:rows] * 3 + tensor.abs().mean() + 1
    else:
        changed[-rows:] = tensor[:rows]  # integers, such as token ids: only ids of this batch are certain to be valid
    return changed


def _relative_change(before: Tensor, after: Tensor, num_samples: int) -> float:
    """Return the relative change of the rows of all samples except the last; 0 for a change within rounding."""
    rows = before.shape[0] if before.dim() else 0
    if before.dim() == 0 or before.shape != after.shape or rows % num_samples or not before.is_floating_point():
        return 0.0
    others = slice(None, rows - rows // num_samples)
    distance = float((before[others] - after[others]).abs().max()) if before[others].numel() else 0.0
    scale = float(before[others].abs().max()) if before[others].numel() else 0.0
    rounding = 1e3 * torch.finfo(before.dtype).eps  # a matrix product may be summed in a different order
    return distance / scale if scale and distance > rounding * scale else 0.0


@dataclass(frozen=True, slots=True)
class Replaced:
    """A model whose BatchNorm layers have been replaced.

    Attributes:
        model: a copy of the model; the original is unchanged.
        layers: name of each replaced layer to a text with the old and the new layer.
        retrain: a sentence that explains how many layers must be trained again, and why.
    """

    model: nn.Module
    layers: Mapping[str, str]
    retrain: str


def replaced(model: nn.Module, kind: Kind, *, num_groups: int | None = None) -> Replaced:
    """Return a copy of a model with other layers instead of BatchNorm; call it before the optimizer is built.

    Each new layer copies weight, bias and eps of the old one. Running statistics have no counterpart.

    Args:
        model: the model; it is not changed.
        kind: "group_norm", or "layer_norm" (one group: over channels and positions).
        num_groups: groups per layer for "group_norm"; None: the largest number up to 32 with at least 4 channels each.

    Raises:
        UserError: an unknown kind, or a number of groups that does not divide a layer's channels.

    Source: Wu and He, "Group Normalization", 2018, for the 32 groups.
    """
    if kind not in get_args(Kind):
        message = f"{kind=} must be one of {', '.join(map(repr, get_args(Kind)))}."
        raise UserError(message, code="unknown_kind")
    check_supported_layers(model, num_ranks=1, frozen=True)  # only BatchNorm is replaced
    copied = copy.deepcopy(model)
    replaced_by: dict[str, str] = {}
    new_of: dict[nn.Module, nn.Module] = {}  # a layer that is used twice stays one layer
    for name, old in batch_norms(copied).items():
        groups = 1 if kind == "layer_norm" else num_groups or default_groups(old.num_features)
        if old.num_features % groups:
            message = f"{num_groups=} must divide the {old.num_features} channels of layer {name!r}. Leave it out."
            raise UserError(message, code="not_a_divisor")
        new = nn.GroupNorm(groups, old.num_features, eps=old.eps, affine=old.affine)
        new_of[old] = _with_parameters_of(new, old)
        replaced_by[name] = f"{type(old).__name__}({old.num_features}) -> GroupNorm({groups}, {old.num_features})"
    # Includes duplicates, because a layer with two names has to be replaced under both names.
    for name, old_layer in list(copied.named_modules(remove_duplicate=False)):
        # The model itself has the name ""; if it is a BatchNorm layer, it is replaced below.
        if name and old_layer in new_of:
            parent, _, attribute = name.rpartition(".")
            setattr(copied.get_submodule(parent), attribute, new_of[old_layer])
    retrain = (
        f"{len(replaced_by)} layers: weight, bias and eps were copied where a layer has them, and running statistics "
        "dropped. The new layers compute another function, so a trained model needs more training, and a learning "
        "rate tuned for BatchNorm may be too high."
    )
    return Replaced(new_of.get(copied, copied), replaced_by, retrain)


def default_groups(num_channels: int) -> int:
    """Return the largest divisor of `num_channels` up to 32 with at least 4 channels per group; 1 if there is none."""
    largest = min(_MAX_GROUPS, num_channels // _MIN_CHANNELS_PER_GROUP)
    return max((groups for groups in range(1, largest + 1) if num_channels % groups == 0), default=1)


def _with_parameters_of(new: nn.Module, old: BatchNormBase) -> nn.Module:
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            old_parameter = getattr(old, name)
            if old_parameter is not None:  # BatchNorm(bias=False) only has a weight
                parameter.data = old_parameter.detach().clone()
                parameter.requires_grad_(old_parameter.requires_grad)
    return new.train(old.training)
