"""Several replicas of the model in one process, like torch's legacy `nn.DataParallel`: for comparison.

Every micro-batch is cut by samples, each replica runs its part, and outputs are joined on the first device, where the
loss is computed. On CUDA each replica has a device and a thread, by the functions of `torch.nn.parallel`. On a CPU
replicas run one after another: the gradient is the same, and nothing is faster. New replicas are made in each call,
threads compete for Python's lock, and the first device holds outputs and loss too: `ddp` and `all_reduce`, with a
process for each device, are faster.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import parallel_apply, replicate

from anybatch.core.compatibility import Feature
from anybatch.core.geometry import checked_int
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import even_parts
from anybatch.core.torch_internals import BatchNormBase, dense_values
from anybatch.core.tree import (
    Batch,
    carries_samples,
    count_samples,
    leaves_of,
    length_of,
    map_tree,
    merge_trees,
    slice_samples,
    tensors_of,
)
from anybatch.errors import CompositionError, DataError, ParameterError, UserError, warn_user
from anybatch.parallel.single import LocalSums
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionObserver
from anybatch.parallel.torch_internals import user_hooks_only, without_hooks
from anybatch.parallel.world import World

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and keyword arguments."""
_REPLICAS_ON_CPU = 2
_MIN_SAMPLES = 3
"""Minimum samples for parts of different sizes, which show the outputs whose first axis follows the samples."""
_MAX_SMALL_CALLS = 16
"""Number of uncut micro-batches before a warning; in trial runs they may be too small to be cut."""
_ODD = 0x9E3779B97F4A7C15
"""Spreads consecutive seeds: 2**64 divided by the golden ratio."""


class DataParallel(LocalSums):
    """Replicas in one process, for comparison: the scheme of torch's `nn.DataParallel`, one after another on a CPU.

    The loss function is called once for each micro-batch, with a copy of the model that differs only in its call:
    `model(x)` runs in replicas, and the loss sees the outputs of the whole micro-batch. So the gradient equals a single
    device's for any loss. `model.encode(x)` and other methods run on the first replica, unless they call the model
    themselves; a warning follows if the other replicas stay idle.

    Args:
        replicas: number of replicas. None: all CUDA devices; 2 on a CPU.

    Raises:
        UserError: `replicas` is not a whole number of at least 1.
    """

    capabilities = Capabilities(
        name="data_parallel", feature=Feature.DATA_PARALLEL, sparse_gradients=True, splits_micro_batches=True
    )

    def __init__(self, *, replicas: int | None = None) -> None:
        self._replicas = None if replicas is None else checked_int("replicas", replicas)
        super().__init__()
        self._models: Mapping[str, _ReplicatedModule] = {}
        self._is_one_module = True
        self._num_small_calls = 0

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Register the parameters, and prepare calls of the model in replicas; refuse modules without copies."""
        num_replicas, on_cpu = self._num_replicas(world.device), world.device.type == "cpu"
        _refuse_scripts(modules)
        prepared = super().prepare(modules, model, world, on_reduction)
        place = "one after another on the CPU" if on_cpu else "by the functions of nn.DataParallel"
        decisions = {
            "replicas": f"{num_replicas}, {place}: for comparison. New ones are made in each call, and outputs, loss "
            "and update are on the first device; strategy='ddp' under torchrun has a process for each device"
        }
        if any(isinstance(module, BatchNormBase) and module.training for module in modules.modules()):
            decisions["batch norm"] = (
                "layers in training mode normalise the samples of each replica by their own statistics, and running "
                "statistics come from the first replica alone (norms='freeze' avoids both)"
            )
        if num_replicas == 1:
            return replace(prepared, decisions=decisions)
        self._is_one_module = isinstance(model, nn.Module)
        named = {"model": model} if self._is_one_module else model
        first = world.device.index or 0
        devices = () if on_cpu else range(first, first + num_replicas)
        self._models = {
            name: _ReplicatedModule(module, num_replicas, devices)
            for name, module in cast("Mapping[str, nn.Module]", named).items()
        }
        return replace(prepared, call=self._call, decisions=decisions)

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Return the gradients accumulated in this process."""
        gradients, numbers = super().finish_gradients(numbers)
        used = set[int]().union(*(model.used for model in self._models.values() if model.devices))
        if not used:
            return gradients, numbers
        # On CUDA torch gives unused parameters zeros, which weight decay would move; a single device gives None.
        return [
            None if g is not None and id(p) not in used and not dense_values(g).any() else g
            for p, g in zip(self._parameters, gradients, strict=True)
        ], numbers

    def place_gradients(self) -> None:
        """Start without gradients; no parameter has been used."""
        for model in self._models.values():
            model.used.clear()
        super().place_gradients()

    def close(self) -> None:
        """Drop the models."""
        super().close()
        self._models = {}

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        try:
            num_samples = count_samples(batch)
        except DataError:  # such as for a loss across samples, whose batch is not cut
            num_samples = 0
        own = frozenset(_address(tensor) for tensor in tensors_of(batch) if tensor.layout is torch.strided)
        stand_ins = {name: model.stand_in(num_samples, own) for name, model in self._models.items()}
        try:
            return function(stand_ins["model"] if self._is_one_module else stand_ins, batch)
        finally:
            for name, model in self._models.items():
                model.take_back(stand_ins[name])
            if num_samples > 1 and self._num_small_calls < _MAX_SMALL_CALLS:
                self._warn_if_idle(num_samples)

    def _warn_if_idle(self, num_samples: int) -> None:
        """Warn once if the first calls of the loss function leave all replicas but the first idle."""
        is_cut = any(model.is_cut for model in self._models.values())
        self._num_small_calls += 1 if num_samples < _MIN_SAMPLES and not is_cut else _MAX_SMALL_CALLS
        if is_cut or self._num_small_calls < _MAX_SMALL_CALLS:
            return
        reasons = [model.why_uncut for model in self._models.values() if model.why_uncut]
        why = reasons[0] if reasons else "the loss function calls methods or parts of the model, and not the model"
        warn_user(
            f"strategy 'data_parallel' ran a micro-batch of {num_samples} samples on the first replica alone: {why}. "
            "The gradient is right, and the other replicas are idle. Call model(...) with tensors of the micro-batch, "
            "whose first axis is the sample, or use strategy='ddp' (torchrun), where methods take part too."
        )

    def _num_replicas(self, device: torch.device) -> int:
        if device.type == "cpu":
            return self._replicas or _REPLICAS_ON_CPU
        if device.type != "cuda":
            message = (
                f"strategy 'data_parallel' has replicas on CUDA devices or on a CPU, and the model is on "
                f"{str(device)!r}. Use strategy='single'."
            )
            raise UserError(message)
        num_devices = torch.cuda.device_count() - (device.index or 0)
        if (self._replicas or num_devices) > num_devices:
            message = (
                f"replicas={self._replicas} must be at most {num_devices}, the number of CUDA devices from {device} on."
            )
            raise UserError(message)
        return self._replicas or num_devices


class _ReplicatedModule:
    """Runs calls of a module in replicas: on `devices`, or one after another on the CPU if there are none.

    The first replica is the module itself, or its copy on the same device: changes that its forward makes to buffers
    persist, and only its statistics are read. `used` are the ids of the parameters used by replicas on `devices`;
    `is_cut` is whether a call was cut since the last `stand_in`, and `why_uncut` a clause with the reason why not.
    """

    def __init__(self, module: nn.Module, num_replicas: int, devices: Sequence[int]) -> None:
        self._module, self._num_replicas, self.devices = module, num_replicas, devices
        self.used: set[int] = set()
        self.is_cut, self.why_uncut = False, ""

    def stand_in(self, num_samples: int, own: Collection[tuple[int, int]]) -> nn.Module:
        """Return a module with the same class, parts, parameters and attributes, whose call runs in replicas.

        `own` are the addresses of the micro-batch's tensors.
        """
        self.is_cut, self.why_uncut = False, ""
        stand_in = without_hooks(self._module)
        vars(stand_in)["forward"] = partial(self._forward, num_samples, own)
        return stand_in

    def take_back(self, stand_in: nn.Module) -> None:
        """Copy attributes that the loss function has set back to the module."""
        attributes = vars(self._module)
        for name, value in vars(stand_in).items():
            if name != "forward" and "_hooks" not in name and value is not attributes.get(name, self):
                attributes[name] = value

    def _forward(self, num_samples: int, own: Collection[tuple[int, int]], /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the model's)
        call = cut_call((args, kwargs), self._num_replicas, num_samples, own)
        if isinstance(call, str):
            self.why_uncut = call
            return self._module(*args, **kwargs)
        self.is_cut = True
        return call.join(self._on_devices(call) if self.devices else self._in_sequence(call))

    def _in_sequence(self, call: "CutCall") -> list[Any]:
        outputs = []
        for number in range(len(call.ranges)):
            args, kwargs = call.part(number)
            if not number:
                outputs.append(self._module(*args, **kwargs))
                continue
            copies = {name: tensor.clone() for name, tensor in self._module.named_parameters()}
            copies |= {name: tensor.clone() for name, tensor in self._module.named_buffers()}
            with user_hooks_only([self._module]):
                outputs.append(functional_call(self._module, copies, args, kwargs))
        return outputs

    def _on_devices(self, call: "CutCall") -> list[Any]:
        first, *others = [torch.cuda.default_generators[device] for device in self.devices]
        for number, generator in enumerate(others, 1):
            # Each device has a generator, and the engine seeds only the first device's.
            generator.manual_seed((first.initial_seed() + number * _ODD) % 2**63)
            generator.set_offset(first.get_offset())
        devices = list(self.devices[: len(call.ranges)])
        replicas = replicate(self._module, devices)
        for replica in replicas:
            for original, part in zip(self._module.modules(), replica.modules(), strict=True):
                for name, parameter in original.named_parameters(recurse=False, remove_duplicate=False):
                    if (copy := getattr(part, name)).requires_grad:
                        copy.register_hook(partial(self._note, id(parameter)))
        parts = [call.part(number, device) for number, device in enumerate(devices)]
        with user_hooks_only(replicas[1:]):
            outputs: list[Any] = parallel_apply(replicas, [part[0] for part in parts], [p[1] for p in parts], devices)
        return outputs

    def _note(self, parameter: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.used.add(parameter)


@dataclass(frozen=True, slots=True)
class CutCall:
    """A call of a model in parts.

    Arguments whose first axis has `num_samples` are cut into `ranges` (first sample, exclusive end); every part gets
    the others whole.
    """

    arguments: Arguments
    num_samples: int
    ranges: tuple[tuple[int, int], ...]

    def part(self, number: int, device: int | None = None) -> Arguments:
        """Return the arguments of one part, on a device."""

        def piece(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
            if _has_rows(leaf, self.num_samples):
                leaf = slice_samples(leaf, *self.ranges[number])
            return leaf if device is None or not isinstance(leaf, Tensor) else leaf.to(device, non_blocking=True)

        args, kwargs = self.arguments
        pieces = tuple(map_tree(value, piece, cutting=True) for value in args)
        return pieces, {name: map_tree(value, piece, cutting=True) for name, value in kwargs.items()}

    def join(self, outputs: Sequence[Any]) -> Any:  # noqa: ANN401 (the model's)
        """Join the outputs of all parts, or raise a `CompositionError` if the result would not be exact."""
        try:
            return merge_trees(outputs, self._merged)
        except DataError as error:
            message = _refused("its output", f"replicas return different structures ({error})")
            raise CompositionError(message) from error

    def _merged(self, path: str, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 (a tensor or anything else)
        name, sizes, first = f"its output{path}", [stop - start for start, stop in self.ranges], leaves[0]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            if all(leaf is first or (type(leaf) is type(first) and leaf == first) for leaf in leaves):
                return first
            raise CompositionError(_refused(name, f"it is {first!r} on one replica and another value elsewhere"))
        has_axes = all(leaf.dim() and leaf.layout is torch.strided and not leaf.is_nested for leaf in leaves)
        rows = len(first) // sizes[0] if has_axes else 0
        if rows and all(len(leaf) == rows * size for leaf, size in zip(leaves, sizes, strict=True)):
            if rows > 1:
                why = f"it has {rows} rows for each sample, in an order that shapes do not show"
                raise CompositionError(_refused(name, why))
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
                raise CompositionError(_refused(name, f"rows have different shapes on replicas: {shapes}"))
            return torch.cat([leaf.to(first.device) for leaf in leaves])
        shape = tuple(first.shape)
        if any(leaf.requires_grad for leaf in leaves):
            kind = f"of shape {shape}" if shape else "a scalar"
            raise CompositionError(_refused(name, f"it is {kind}, and each replica has computed a different one"))
        if not all(leaf.shape == first.shape and torch.equal(leaf.to(first.device), first) for leaf in leaves):
            raise CompositionError(_refused(name, f"replicas have returned different values of shape {shape}"))
        return first


def cut_call(arguments: Arguments, num_parts: int, num_samples: int, own: Collection[tuple[int, int]]) -> CutCall | str:
    """Return a call in at most `num_parts` parts, or a clause with the reason why it is not cut.

    Shapes show the arguments that carry samples. `own` are addresses of the micro-batch's tensors, which certainly do.
    """
    if num_samples < _MIN_SAMPLES:
        return f"{num_samples} samples are too few to see which outputs follow them"
    values = (*arguments[0], *arguments[1].values())
    leaves = [leaf for value in values for _, leaf in leaves_of(value, "", cutting=True)]
    if not any(_has_rows(leaf, num_samples) for leaf in leaves):
        return f"no argument has the micro-batch's {num_samples} samples as its first axis"
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if len(tensors) > 1 and any(num_samples in tensor.shape[1:] for tensor in tensors):
        strange = [one for one in tensors if _has_rows(one, num_samples) and _address(one) not in own]
        if strange:
            return (
                f"an argument of shape {tuple(strange[0].shape)} is not from the micro-batch, and its axis of "
                f"{num_samples} may or may not be the sample axis"
            )
    sizes = list(even_parts(num_samples, min(num_parts, num_samples)))
    if sizes[0] == sizes[-1] == 1:
        sizes = list(even_parts(num_samples, num_samples - 1))
    elif sizes[0] == sizes[-1]:  # different sizes, so that an output of fixed length cannot match each part
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return CutCall(arguments, num_samples, tuple(pairwise(ends)))


def _address(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start of a tensor's memory and its row stride: equal for slices of its columns."""
    return tensor.untyped_storage().data_ptr(), tensor.stride(0) if tensor.dim() else 0


def _refused(name: str, why: str) -> str:
    return (
        f"strategy 'data_parallel' cannot join what the replicas of the model have returned: {name}: {why}. Return one "
        "value or row for each sample, and compute losses and means in the loss function; or use "
        "strategy='all_reduce' (torchrun), which does not cut the model's arguments."
    )


def _refuse_scripts(modules: nn.Module) -> None:
    for name, module in modules.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            message = (
                f"module {name!r} is a ScriptModule, which strategy 'data_parallel' cannot replicate. Pass the "
                "module from before scripting, or use strategy='single'."
            )
            raise ParameterError(message)


def _has_rows(leaf: Any, number: int) -> bool:  # noqa: ANN401 (a tensor, list, array or anything else)
    return carries_samples(leaf) and length_of(leaf) == number
