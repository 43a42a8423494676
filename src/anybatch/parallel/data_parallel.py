"""Several replicas of the model in one process, like torch's legacy `nn.DataParallel`: for comparison.

Every micro-batch is split by samples, each replica runs its part, and outputs are joined on the first device, where the
loss is computed. On CUDA, `torch.nn.parallel` runs each replica on its own device, in its own thread. On a CPU
replicas run one after another: the gradient is the same, and nothing is faster. New replicas are made in each call,
threads compete for Python's GIL, and the first device holds outputs and loss too: `ddp` and `all_reduce`, with a
process for each device, are faster. As in torch's class, unused parameters get zeros as gradients on CUDA, not None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import parallel_apply, replicate

from anybatch.core.compatibility import Feature
from anybatch.core.geometry import checked_int
from anybatch.core.loss_kinds import LossFunction
from anybatch.core.splitting import even_parts
from anybatch.core.torch_internals import BatchNormBase
from anybatch.core.tree import (
    Batch,
    carries_samples,
    count_samples,
    leaves_of,
    length_of,
    map_tensors,
    map_tree,
    merge_trees,
    slice_samples,
)
from anybatch.errors import CompositionError, DataError, ParameterError, UserError, warn_user
from anybatch.parallel.single import LocalSums
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionNotifier
from anybatch.parallel.torch_internals import user_hooks_only, without_hooks
from anybatch.parallel.world import World

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and keyword arguments."""
_REPLICAS_ON_CPU = 2
_MIN_SAMPLES = 3
"""With fewer samples, all parts have the same size, so outputs with one row per sample cannot be recognised."""
_SEED_STEP = 0x9E3779B97F4A7C15
"""Spreads consecutive seeds: 2**64 divided by the golden ratio."""


class DataParallel(LocalSums):
    """Replicas in one process, like torch's `nn.DataParallel`, for comparison; on a CPU they run one after another.

    The loss function is called once for each micro-batch, with a copy of the model that differs only in its call:
    `model(x)` runs in replicas, and the loss sees the outputs of the whole micro-batch. So the gradient equals a single
    device's for any loss. `model.encode(x)` and other methods run on the first replica, unless they call the model
    themselves; if the other replicas stay idle, there is a warning.

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
        self._has_warned = False

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Register the parameters, and prepare calls of the model in replicas; refuse modules that cannot be copied."""
        num_replicas, on_cpu = self._num_replicas(world.device), world.device.type == "cpu"
        _check_no_scripts(modules)
        prepared = super().prepare(modules, model, world, notifier)
        how = "one after another on the CPU" if on_cpu else "in threads, as by nn.DataParallel"
        decisions = {
            "replicas": f"{num_replicas}, run {how}, for comparison. Each call makes new replicas, and outputs, loss "
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
        modules_by_name = {"model": model} if self._is_one_module else model
        first = world.device.index or 0
        devices = () if on_cpu else range(first, first + num_replicas)
        self._models = {
            name: _ReplicatedModule(module, num_replicas, devices)
            for name, module in cast("Mapping[str, nn.Module]", modules_by_name).items()
        }
        return replace(prepared, call=self._call, decisions=decisions)

    def close(self) -> None:
        """Drop the models."""
        super().close()
        self._models = {}

    def _call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (the loss's result)
        try:
            num_samples = count_samples(batch)
        except DataError:  # such as for an `ab.joint` loss, whose batch is not split
            num_samples = 0
        stand_ins = {name: model.stand_in(num_samples) for name, model in self._models.items()}
        try:
            return function(stand_ins["model"] if self._is_one_module else stand_ins, batch)
        finally:
            for name, model in self._models.items():
                model.copy_attributes_from(stand_ins[name])
            is_idle = num_samples >= _MIN_SAMPLES and not any(model.was_split for model in self._models.values())
            if is_idle and not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"strategy 'data_parallel' ran a micro-batch of {num_samples} samples on the first replica alone: "
                    "the gradient is right, and the other replicas are idle. Call model(...), not its methods, with "
                    f"tensors of which only the first axis has {num_samples} entries, or use strategy='ddp' (torchrun)."
                )

    def _num_replicas(self, device: torch.device) -> int:
        if device.type == "cpu":
            return self._replicas or _REPLICAS_ON_CPU
        if device.type != "cuda":
            message = (
                "strategy 'data_parallel' has replicas on CUDA devices or on a CPU, but the model is on "
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
    persist, and only its statistics are read. `was_split`: a call was split since the last `stand_in`.
    """

    def __init__(self, module: nn.Module, num_replicas: int, devices: Sequence[int]) -> None:
        self._module, self._num_replicas, self._devices = module, num_replicas, devices
        self.was_split = False

    def stand_in(self, num_samples: int) -> nn.Module:
        """Return a module with the same class, parts, parameters and attributes, whose call runs in replicas."""
        self.was_split = False
        stand_in = without_hooks(self._module)
        vars(stand_in)["forward"] = partial(self._forward, num_samples)
        return stand_in

    def copy_attributes_from(self, stand_in: nn.Module) -> None:
        """Copy the attributes that the loss function has set on the stand-in to the module."""
        attributes = vars(self._module)
        for name, value in vars(stand_in).items():
            if name != "forward" and "_hooks" not in name and value is not attributes.get(name, self):
                attributes[name] = value

    def _forward(self, num_samples: int, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (the model's)
        if not _can_split((args, kwargs), num_samples):
            return self._module(*args, **kwargs)
        self.was_split = True
        sizes = _part_sizes(num_samples, self._num_replicas)
        ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        parts = [_part((args, kwargs), num_samples, start, stop) for start, stop in pairwise(ends)]
        outputs = self._on_devices(parts) if self._devices else self._in_sequence(parts)
        return _join(outputs, sizes)

    def _in_sequence(self, parts: Sequence[Arguments]) -> list[Any]:
        args, kwargs = parts[0]
        outputs = [self._module(*args, **kwargs)]
        for arguments in parts[1:]:
            buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
            with user_hooks_only([self._module]):
                outputs.append(functional_call(self._module, buffers, *arguments))
        return outputs

    def _on_devices(self, parts: Sequence[Arguments]) -> list[Any]:
        first, *others = [torch.cuda.default_generators[device] for device in self._devices]
        for number, generator in enumerate(others, 1):
            # Each device has a generator, and the engine seeds only the first device's.
            generator.manual_seed((first.initial_seed() + number * _SEED_STEP) % 2**63)
            generator.set_offset(first.get_offset())
        devices = list(self._devices[: len(parts)])
        replicas = replicate(self._module, devices)
        moved = [
            map_tensors(part, partial(Tensor.to, device=device, non_blocking=True))
            for part, device in zip(parts, devices, strict=True)
        ]
        with user_hooks_only(replicas[1:]):
            outputs: list[Any] = parallel_apply(replicas, [args for args, _ in moved], [kw for _, kw in moved], devices)
        return outputs


def _can_split(arguments: Arguments, num_samples: int) -> bool:
    """Whether a call of the model can be split: arguments whose first axis has one entry per sample are split.

    False for fewer than three samples, because outputs per sample could not be recognised. Also false if one of several
    tensors has a later axis as long as the number of samples, such as a (T, T) mask for T samples.
    """
    leaves = [leaf for _, leaf in leaves_of(arguments, "", keep_sliced=True)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if num_samples < _MIN_SAMPLES or (len(tensors) > 1 and any(num_samples in tensor.shape[1:] for tensor in tensors)):
        return False
    return any(_has_rows(leaf, num_samples) for leaf in leaves)


def _part_sizes(num_samples: int, num_parts: int) -> list[int]:
    """Return the sizes of at most `num_parts` parts; two sizes differ, to recognise outputs with one row per sample."""
    sizes = list(even_parts(num_samples, min(num_parts, num_samples - 1)))
    if sizes[0] == sizes[-1]:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    return sizes


def _part(arguments: Arguments, num_samples: int, start: int, stop: int) -> Arguments:
    """Return the arguments of one part; arguments without samples are passed unchanged."""

    def piece(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        return slice_samples(leaf, start, stop) if _has_rows(leaf, num_samples) else leaf

    part: Arguments = map_tree(arguments, piece, keep_sliced=True)
    return part


def _join(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:  # noqa: ANN401 (the model's)
    """Join the outputs of the parts; raise a `CompositionError` if the result would not be exact."""

    def merged(path: str, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 (a tensor or anything else)
        first = leaves[0]
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            if all(leaf is first or (type(leaf) is type(first) and leaf == first) for leaf in leaves):
                return first
            raise CompositionError(_refusal(path, f"{first!r} on one replica and another value elsewhere"))
        has_rows = all(
            leaf.dim() and leaf.layout is torch.strided and not leaf.is_nested and len(leaf) == size
            for leaf, size in zip(leaves, sizes, strict=True)
        )
        if has_rows and len({leaf.shape[1:] for leaf in leaves}) == 1:
            return torch.cat([leaf.to(first.device) for leaf in leaves])
        is_same = all(leaf.shape == first.shape and torch.equal(leaf.to(first.device), first) for leaf in leaves)
        if any(leaf.requires_grad for leaf in leaves) or not is_same:
            shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise CompositionError(_refusal(path, f"its shapes are {shapes}, but the replicas ran {sizes} samples"))
        return first

    try:
        return merge_trees(outputs, merged)
    except DataError as error:
        raise CompositionError(_refusal("", f"different structures ({error})")) from error


def _refusal(path: str, what: str) -> str:
    return (
        f"strategy 'data_parallel' cannot join output{path} of the model's replicas: {what}. Return one row for each "
        "sample, and compute losses and means in the loss function; or use strategy='all_reduce' (torchrun)."
    )


def _check_no_scripts(modules: nn.Module) -> None:
    for name, module in modules.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            message = (
                f"module {name!r} is a ScriptModule, which strategy 'data_parallel' cannot replicate. Pass the "
                "original module instead of the scripted one, or use strategy='single'."
            )
            raise ParameterError(message)


def _has_rows(leaf: Any, number: int) -> bool:  # noqa: ANN401 (a tensor, list, array or anything else)
    return carries_samples(leaf) and length_of(leaf) == number
