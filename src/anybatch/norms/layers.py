"""Find BatchNorm layers and other layers that couple samples: known layers by type, others by trial."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.hooks import RemovableHandle

from anybatch.core.tensors import BufferValues
from anybatch.core.torch_internals import BatchNormBase, InstanceNormBase
from anybatch.core.tree import Batch, count_samples, map_tensors, tensors_of
from anybatch.errors import CompositionError, DataError, ParameterError

Tracking = BatchNormBase | InstanceNormBase
"""A layer with running statistics."""

ModelCall = Callable[[nn.Module, Any], object]
"""Runs a model on a batch, such as `lambda model, batch: model(batch["image"])`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The collectives that normalisation over ranks needs. The default is one rank.

    Attributes:
        size: number of ranks.
        sum: replaces a small tensor on this rank's device by its sum over ranks, and returns it.
        most: returns the largest of the ranks' integers.
    """

    size: int = 1
    sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    most: Callable[[int], int] = lambda number: number


def batch_norms(modules: nn.Module) -> dict[str, BatchNormBase]:
    """Return the BatchNorm layers of all kinds by name, in train and in evaluation mode."""
    return {name: module for name, module in modules.named_modules() if isinstance(module, BatchNormBase)}


def tracking_layers(modules: nn.Module) -> dict[str, Tracking]:
    """Return the layers with running statistics by name: BatchNorm, and InstanceNorm that tracks them."""
    return {
        name: module
        for name, module in modules.named_modules()
        if isinstance(module, Tracking) and module.running_mean is not None
    }


def refuse_unfit_layers(modules: nn.Module, *, num_ranks: int, frozen: bool) -> None:
    """Refuse layers that no policy supports; with `frozen`, BatchNorm layers use their running statistics.

    Raises:
        ParameterError: a lazy layer without parameters, because it has not seen a batch.
        CompositionError: torch's SyncBatchNorm on several ranks, unless frozen: it communicates in each forward, even
            if ranks run different numbers of micro-batches.
    """
    for name, module in batch_norms(modules).items():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
            message = (
                f"layer {name!r} is a {type(module).__name__} that has not seen a batch, so it has no parameters yet. "
                "Run the model on a batch once before the optimizer and the engine are built."
            )
            raise ParameterError(message, code="lazy_layer")
        if isinstance(module, nn.SyncBatchNorm) and num_ranks > 1 and not frozen:
            message = (
                f"layer {name!r} is a SyncBatchNorm, and there are {num_ranks} ranks: it waits for the others in each "
                "forward, which hangs where ranks run different numbers of micro-batches. Use torch's BatchNorm "
                "layers with norms='sync', or norms='exact'."
            )
            raise CompositionError(message, code="synced_layer")


_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def coupling_layers(model: nn.Module, batch: Batch, *, call: ModelCall | None = None) -> dict[str, str]:
    """Return the layers whose output for a sample depends on other samples in train mode, each with the evidence.

    Known by type: all of torch's BatchNorm layers, and InstanceNorm with running statistics (its output depends on no
    other sample, its buffers do). All other modules are tried: the model runs once, and each module runs again on its
    recorded inputs, with the same random numbers and then with the last sample changed. If the output of another sample
    changes, the module couples them. Of nested modules only the innermost is returned. Parameters, buffers, modes and
    random numbers are restored.

    A module is tried only if the first axis of its inputs is the samples, alone or flattened with the axes after it. So
    pass a batch whose size differs from every other length in the model, such as 7.

    Args:
        model: the model.
        batch: at least two samples, on the model's device.
        call: runs the model on the batch; None: `model(batch)`.

    Raises:
        DataError: fewer than two samples.
        ParameterError: a lazy layer that has not seen a batch.
    """
    refuse_unfit_layers(model, num_ranks=1, frozen=False)
    num_samples = count_samples(batch)
    if num_samples < 2:  # noqa: PLR2004 (one to observe, and another to change)
        message = f"the batch holds {num_samples} sample(s); a test of whether one depends on another needs at least 2."
        raise DataError(message, code="one_sample")
    found = _by_type(model)
    with _in_train_mode(model, batch):
        run = call or (lambda module, given: module(given))
        tried = tried_couplings(model, lambda: run(model, batch), num_samples)
    found |= {
        name: f"{type(model.get_submodule(name)).__name__}: with one sample changed, the output of others moves by "
        f"{change:.1e}"
        for name, change in tried.items()
        if not any(name == known or _is_inside(known, name) for known in found)
    }
    return {name: found[name] for name, _ in model.named_modules() if name in found}


def tried_couplings(modules: nn.Module, run: Callable[[], object], num_samples: int) -> dict[str, float]:
    """Return the innermost modules whose output for a sample changes with another sample, and by how much.

    The values are the largest change of another sample's output, divided by the largest output. The caller sets the
    modules' modes, and restores buffers and random numbers. `run` runs a forward over the whole batch.
    """
    with torch.no_grad():
        seen = _inputs_of_modules(modules, run)
        names = {name for name, module in modules.named_modules() if module in seen}
        found: dict[str, float] = {}
        # Deepest first, so that a module is skipped once one inside of it has been found.
        for name in sorted(names, key=lambda name: -name.count(".") - bool(name)):
            if any(_is_inside(other, name) for other in found):
                continue
            module = modules.get_submodule(name)
            try:
                change = _coupling(module, seen[module], num_samples)
            except RuntimeError:  # recorded inside of `torch.func.vmap`, and unusable outside
                continue
            if change:
                found[name] = change
    return found


def _by_type(model: nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, BatchNormBase):
            found[name] = f"{type(module).__name__}: normalises by the statistics of the micro-batch"
        elif isinstance(module, InstanceNormBase) and module.track_running_stats:
            found[name] = f"{type(module).__name__}: its running statistics come from micro-batches"
    return found


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


@contextmanager
def _in_train_mode(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Run in train mode; restores modes, buffers and random numbers."""
    buffers = BufferValues(model)
    modes = {module: module.training for module in model.modules()}
    devices = {tensor.device for tensor in (*model.parameters(), *tensors_of(batch)) if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng([device.index or 0 for device in devices]):
            model.train()
            yield
    finally:
        buffers.restore()
        for module, training in modes.items():
            module.training = training


def _inputs_of_modules(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, _Inputs]:
    """Return the arguments of each module's first call."""
    seen: dict[nn.Module, _Inputs] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in seen:  # copies, because a layer may change its input in place
            seen[module] = map_tensors(args, _copy), map_tensors(kwargs, _copy)

    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(record, with_kwargs=True) for module in model.modules()
    ]
    try:
        with torch.enable_grad():  # a loss may differentiate, as for a gradient penalty
            run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _coupling(module: nn.Module, inputs: _Inputs, num_samples: int) -> float:
    """Return the largest relative change of other samples' outputs if the last sample changes."""
    changed = map_tensors(inputs, lambda tensor: _with_other_last_sample(tensor, num_samples))
    # No input has rows of samples to change.
    if all(torch.equal(one, other) for one, other in zip(tensors_of(inputs), tensors_of(changed), strict=True)):
        return 0.0
    outputs = _outputs(module, (inputs, inputs, changed))
    # Two equal calls differ: the module keeps state between calls, such as a cache, and cannot be tested.
    if not outputs or _moves(outputs[0], outputs[1], num_samples):
        return 0.0
    return _moves(outputs[0], outputs[2], num_samples)


def _outputs(module: nn.Module, calls: Sequence[_Inputs]) -> list[list[Tensor]]:
    """Return the output of each call, from the same buffers and random numbers; an empty list if one fails."""
    buffers, state = BufferValues(module), torch.get_rng_state()
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


def _moves(ones: Sequence[Tensor], others: Sequence[Tensor], num_samples: int) -> float:
    return max((_moved(one, other, num_samples) for one, other in zip(ones, others, strict=False)), default=0.0)


def _in_a_tree(output: object) -> Batch:
    return output if isinstance(output, (Tensor, Mapping, tuple, list)) else (output,)


def _with_other_last_sample(tensor: Tensor, num_samples: int) -> Tensor:
    """Return the tensor with the rows of the last sample changed to other valid values."""
    if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % num_samples:
        return tensor
    rows = tensor.shape[0] // num_samples
    changed = tensor.clone()
    if tensor.is_floating_point():
        # Another value even if all samples are equal, or zero.
        changed[-rows:] = tensor[:rows] * 3 + tensor.abs().mean() + 1
    else:
        changed[-rows:] = tensor[:rows]  # token ids, say: only another sample's ids are certain to be valid
    return changed


def _moved(one: Tensor, other: Tensor, num_samples: int) -> float:
    if one.dim() == 0 or one.shape != other.shape or one.shape[0] % num_samples or not one.is_floating_point():
        return 0.0
    rest = slice(None, one.shape[0] - one.shape[0] // num_samples)
    distance = float((one[rest] - other[rest]).abs().max()) if one[rest].numel() else 0.0
    scale = float(one[rest].abs().max()) if one[rest].numel() else 0.0
    rounding = 1e3 * torch.finfo(one.dtype).eps  # a matrix product may be summed in another order
    return distance / scale if scale and distance > rounding * scale else 0.0
