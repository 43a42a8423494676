"""Helpers of strategy "fsdp": groups of modules to shard, dtypes of shards, collectives, and refused losses."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from anybatch.core.tensors import repeated_blocks
from anybatch.core.tree import tensors_of
from anybatch.errors import LossError, ParameterError
from anybatch.parallel.call_tracker import CallTracker
from anybatch.parallel.strategy import ReductionNotifier
from anybatch.parallel.torch_internals import copy_attributes, sharded_group
from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The dtypes and the memory of weights, gradients and shards under FSDP2.

    Attributes:
        reshard_after_forward: blocks free gathered weights after their forward, and gather them again in the backward.
        param_dtype: dtype of gathered weights and of the computation, such as `torch.bfloat16`. Shards and updates keep
            the parameters' own dtype, and outputs of the model are float32. None for the parameters' dtype.
        reduce_dtype: dtype of gradient sums, over micro-batches and ranks; None for float32 if `param_dtype` is given,
            otherwise for the dtype of the gradients.
        cpu_offload: shards, their gradients and the optimizer's state are in host memory.
    """

    reshard_after_forward: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    cpu_offload: bool = False

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """Dtype of gradient sums; None for the dtype of the gradients."""
        return self.reduce_dtype or (None if self.param_dtype is None else torch.float32)

    def policy(self, *, outermost: bool) -> MixedPrecisionPolicy:
        """Return FSDP2's policy for a module; an outermost module returns float32, as its outputs go to the loss."""
        wide = torch.float32 if outermost and self.param_dtype is not None else None
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.sum_dtype, output_dtype=wide)


@dataclass(frozen=True, slots=True)
class ShardingGroup:
    """A module whose parameters, except those in inner groups, are gathered in one collective.

    Its `name` is empty for the model itself; `outermost`: no other group contains it.
    """

    name: str
    module: nn.Module
    outermost: bool


def sharded_modules(modules: nn.Module) -> list[FSDPModule]:
    """Return all modules that `fully_shard` was called on, outer ones first."""
    sharded: list[Any] = [module for module in modules.modules() if isinstance(module, FSDPModule)]
    return sharded


def check_sharding(modules: nn.Module, world: World) -> None:
    """Raise a `ParameterError` if a part of an already sharded model is not sharded over all ranks."""
    groups = [sharded_group(module) for module in sharded_modules(modules)]
    mesh_of = {id(shard): group.mesh for group in groups if group is not None for shard in group.shards}
    for name, parameter in modules.named_parameters():
        if parameter.dim() and id(parameter) not in mesh_of:
            message = (
                f"parameter {name!r} is not in a module that `fully_shard` was called on, but other parameters are. "
                "Call it on the model itself too, after its parts, or pass the plain model to the engine."
            )
            raise ParameterError(message)
        if id(parameter) not in mesh_of:
            continue
        ranks = sorted(mesh_of[id(parameter)].mesh.flatten().tolist())
        if ranks != list(range(world.size)):
            message = (
                f"parameter {name!r} is sharded over ranks {ranks}, but there are {world.size} ranks, whose gradients "
                "have to be summed. Shard over a mesh of all ranks."
            )
            raise ParameterError(message)


def check_shardable(modules: nn.Module) -> None:
    """Raise a `ParameterError` for parameters that FSDP2 cannot shard, or that would lose hooks or attributes."""
    for name, parameter in modules.named_parameters():
        kind = type(parameter)
        if parameter.dim() and not parameter.is_contiguous():
            message = (
                f"parameter {name!r} has strides {tuple(parameter.stride())} for its shape {tuple(parameter.shape)} "
                "(channels-last or transposed), and FSDP2 shards contiguous parameters only. Convert the model: "
                "model.to(memory_format=torch.contiguous_format), or parameter.data = parameter.data.contiguous(); or "
                "use strategy='zero1', which keeps strides."
            )
            raise ParameterError(message)
        if parameter.requires_grad and kind is not nn.Parameter and nn.Parameter in kind.__mro__:
            message = (
                f"parameter {name!r} is of class {kind.__name__}, and FSDP2 replaces it with a plain nn.Parameter. Use "
                "nn.Parameter, or strategy='zero1', which keeps the objects."
            )
            raise ParameterError(message)


def _outermost_modules(modules: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that have a forward, by name; module lists and dicts have none."""
    if isinstance(modules, (nn.ModuleDict, nn.ModuleList)):
        return {
            f"{name}.{inner}".rstrip("."): module
            for name, child in modules.named_children()
            for inner, module in _outermost_modules(child).items()
        }
    return {"": modules}


def sharding_groups(modules: nn.Module) -> tuple[ShardingGroup, ...]:
    """Return the modules to shard separately: the repeated blocks, then the modules around them.

    A block that shares a parameter with other modules is sharded with the module around it: otherwise each group would
    train a separate copy of the parameter. Refuse groups of several dtypes, and parameters that would still be copied.
    """
    all_uses, groups = _uses(modules), []
    for prefix, outer in _outermost_modules(modules).items():
        outer_uses = _uses(outer)
        shared = [name for name, p in outer.named_parameters() if outer_uses[id(p)] < all_uses[id(p)]]
        if shared:
            message = (
                f"parameter {shared[0]!r} belongs to {prefix!r} and to another of the given modules: FSDP2 would shard "
                "it twice, and train two copies. Put both into one module, or use strategy='all_reduce'."
            )
            raise ParameterError(message)
        # A module that occurs twice in a list has two uses, so it is left out too.
        blocks = {
            f"{prefix}.{row.path}.{name}".strip("."): block
            for row in repeated_blocks(outer)
            for name, block in zip(row.names, row.modules, strict=True)
            if all(num == all_uses[key] for key, num in _uses(block).items())
        }
        groups += [ShardingGroup(name, block, outermost=False) for name, block in blocks.items()]
        if any(True for _ in outer.parameters()):
            groups.append(ShardingGroup(prefix, outer, outermost=True))
    _check_one_type(groups)
    return tuple(groups)


def shard(groups: Sequence[ShardingGroup], mesh: DeviceMesh, sharding: Sharding) -> None:
    """Shard modules in place, inner ones first; parameters move to the mesh's device.

    Shards get the attributes and hooks of their parameters. The mesh has one axis, or two: replicas, and their shards.
    """
    before = [dict(group.module.named_parameters(remove_duplicate=False)) for group in groups]
    # On a CPU shards are in host memory already, and pinning needs an accelerator.
    offloads = sharding.cpu_offload and mesh.device_type != "cpu"
    for group in groups:
        fully_shard(
            group.module,
            mesh=mesh,
            reshard_after_forward=sharding.reshard_after_forward,
            mp_policy=sharding.policy(outermost=group.outermost),
            offload_policy=CPUOffloadPolicy() if offloads else OffloadPolicy(),
            ignored_params=set(whole_parameters(group.module)),
        )
    for group, parameters in zip(groups, before, strict=True):
        shards = dict(group.module.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            if shards[name] is not parameter:
                copy_attributes(parameter, shards[name], hooks=True)


def whole_parameters(modules: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 does not shard: scalars (0-dim)."""
    return [parameter for parameter in modules.parameters() if parameter.dim() == 0]


def _uses(modules: nn.Module) -> Counter[int]:
    """Return how often each parameter is registered, by its id."""
    return Counter(id(parameter) for _, parameter in modules.named_parameters(remove_duplicate=False))


def _check_one_type(groups: Sequence[ShardingGroup]) -> None:
    seen: set[int] = set()
    for group in groups:
        new = {n: p for n, p in group.module.named_parameters() if id(p) not in seen and p.dim() > 0}
        seen |= {id(parameter) for parameter in new.values()}
        types = {parameter.dtype: name for name, parameter in new.items() if parameter.requires_grad}
        if len(types) > 1:
            listed = ", ".join(f"{name!r} is {dtype}" for dtype, name in types.items())
            message = (
                f"FSDP2 reduces the gradients of a module in one message, and {group.name or 'the model'!r} has "
                f"parameters of several types: {listed}. Convert the model to one of them (model.float()); "
                "FSDP(Sharding(param_dtype=torch.bfloat16)) computes in another type."
            )
            raise ParameterError(message)


def raise_shard_used(name: str, cause: Exception | None = None) -> NoReturn:
    """Raise a `LossError` for a loss that computes with a shard."""
    message = (
        f"the loss function uses {name} outside of its block under strategy 'fsdp', where each rank holds a shard: "
        "weights of a block are gathered only while the block runs. Compute this term in the forward of the block and "
        "return it, or use strategy='zero1', which keeps whole weights on every rank."
    )
    raise LossError(message) from cause


def gradient_check_of(name: str) -> Callable[[object], None]:
    """Return an autograd hook that refuses a loss with direct use of a shard, whose gradient would not be summed."""

    def refuse(_: object) -> None:
        raise_shard_used(f"parameter {name!r}")

    return refuse


class BackwardInLoss:
    """Detects a backward in the loss function through a sharded module: it would free weights that are needed again."""

    def __init__(self) -> None:
        self._is_in_loss = False
        self._has_run = False

    def begin(self) -> None:
        """Begin a call of the loss function."""
        self._is_in_loss, self._has_run = True, False

    def ended(self) -> bool:
        """End the call; return whether a backward has started in it."""
        self._is_in_loss = False
        return self._has_run

    def mark(self, module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401, ARG002 (a forward hook)
        """Watch the outputs of a sharded module; a forward hook."""
        if not self._is_in_loss or torch.compiler.is_compiling():
            return
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(self._record)

    def _record(self, gradient: object) -> None:  # noqa: ARG002 (a hook's signature)
        self._has_run = self._has_run or self._is_in_loss


# Renamed in torch 2.13, where the old names warn.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class _Memory:
    """FSDP2's interface for allocating the input and output memory of collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for `size` numbers."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Memory):
    """Gathers the weights of a group of parameters; without a `call_tracker`, torch waits for the collective."""

    def __init__(self, call_tracker: CallTracker | None) -> None:
        self._call_tracker = call_tracker

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,  # noqa: FBT001, FBT002 (torch's protocol)
    ) -> dist.Work | None:
        """Gather the shards of all ranks of the group."""
        is_watched = self._call_tracker is not None and not async_op
        work: dist.Work | None = getattr(dist, _ALL_GATHER)(
            output_tensor, input_tensor, group=group, async_op=async_op or is_watched
        )
        if self._call_tracker is None or async_op or work is None:
            return work
        self._call_tracker.wait(work)
        return None


class ReduceScatter(_Memory):
    """Sums the gradients of group `number` over ranks; each rank keeps its shard."""

    def __init__(self, call_tracker: CallTracker | None, notifier: "ref[ReductionNotifier]", number: int) -> None:
        self._call_tracker = call_tracker
        self._notifier = notifier
        self._number = number

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,  # noqa: FBT001, FBT002 (torch's protocol)
    ) -> dist.Work | None:
        """Sum over the ranks of the group."""
        notifier = self._notifier()
        if notifier is not None and notifier.observers:
            num_bytes = input_tensor.numel() * input_tensor.itemsize
            notifier.reduction(self._number, num_bytes, input_tensor.dtype, "reduce_scatter")
        if self._call_tracker is None or async_op:
            started: dist.Work | None = getattr(dist, _REDUCE_SCATTER)(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return started
        # Gloo's reduce_scatter is an all-reduce of a copy too, but ignores the timeout.
        work = dist.all_reduce(input_tensor, op=op, group=group, async_op=True)
        assert work is not None
        self._call_tracker.wait(work)
        output_tensor.copy_(input_tensor.narrow(0, group.rank() * len(output_tensor), len(output_tensor)))
        return None
