"""Parameters on several ranks: replicas start equal, and split parameters get their layout or are refused."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import CompositionError, ParameterError, ReplicaError
from anybatch.parallel.local_parts import is_dtensor, is_whole, local_part
from anybatch.parallel.strategy import Capabilities, ParameterLayout
from anybatch.parallel.world import World

Initial = Literal["broadcast", "verify"]
_BLOCK_WORDS = 1 << 18  # 2 MiB at a time, so that the mixed words stay in a cache
# Signed, since torch computes with signed 64-bit integers only.
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def align_replicas(modules: nn.Module, world: World, initial: Initial) -> tuple[str, ...]:
    """Make parameters and buffers equal on all ranks, or refuse; return the names of the overwritten tensors.

    "broadcast" overwrites differing tensors with rank 0's values; "verify" raises a `ReplicaError` instead. Names,
    shapes and types have been compared before.
    """
    if world.roll_call is None:  # no other rank
        return ()
    tensors = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    digests = world.gather_from_processes([digest(local_part(tensor)) for tensor in tensors.values()])
    _refuse_unlike(tensors, digests, world)
    differing = tuple(
        name
        for number, name in enumerate(tensors)
        if any(digests[one][number] != digests[group[0]][number] for group in world.data_groups for one in group)
    )
    if differing and initial == "verify":
        message = (
            f"{len(differing)} of {len(tensors)} parameters and buffers differ between ranks, first {differing[0]!r}. "
            "Seed every rank alike before building the model, or use initial='broadcast' to take rank 0's values."
        )
        ranks = tuple(sorted(one for group in world.data_groups for one in group if digests[one] != digests[group[0]]))
        raise ReplicaError(message, ranks=ranks, names=differing)
    # All ranks see all digests, so all of them broadcast the same tensors in the same order.
    for name in differing:
        _broadcast(local_part(tensors[name]), world)
    return differing


def digest(tensor: torch.Tensor) -> int:
    """Return a 64-bit fingerprint of a tensor's bytes, computed on its device.

    The sum modulo 2**64 of every 64-bit word mixed with its position. Mixing is one-to-one, so any single changed word
    changes the sum; it is not linear, so swapped words change it too. It detects accidents, not attacks.

    Source: the mixing is the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014).
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, data.numel(), _BLOCK_WORDS * 8):
        block = data[start : start + _BLOCK_WORDS * 8]
        words = nn.functional.pad(block, (0, -block.numel() % 8)).view(torch.int64)
        positions = torch.arange(words.numel(), device=tensor.device, dtype=torch.int64).add_(start // 8 + 1)
        total += _mix(words + positions * _ODD[0]).sum()
    return int(total)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix each 64-bit word. The masks clear the sign bits that a right shift of a signed word inserts."""
    words = (words ^ ((words >> 30) & (1 << 34) - 1)) * _ODD[1]
    words = (words ^ ((words >> 27) & (1 << 37) - 1)) * _ODD[2]
    return words ^ ((words >> 31) & (1 << 33) - 1)


def _refuse_unlike(tensors: Mapping[str, torch.Tensor], digests: Sequence[Sequence[int]], world: World) -> None:
    """Raise a `ReplicaError` for plain tensors that differ between the processes of one rank: they may be shards."""
    for group in world.model_groups:
        for number, (name, tensor) in enumerate(tensors.items()):
            other = next((one for one in group if digests[one][number] != digests[group[0]][number]), None)
            if other is not None and is_whole(tensor):
                message = (
                    f"{name!r} is a plain tensor but differs between processes {group[0]} and {other}, which run one "
                    "model together. Seed every process alike before building the model (torch.manual_seed). If the "
                    "processes hold different shards, make it a DTensor, as parallelize_module does."
                )
                raise ReplicaError(message, ranks=(other,), names=(name,))


def _broadcast(tensor: torch.Tensor, world: World) -> None:
    with torch.no_grad():
        # A collective needs contiguous memory; the parameter keeps its own strides (channels-last weights, say).
        contiguous = tensor.detach().to(world.device).contiguous()
        dist.broadcast(contiguous, src=world.process_of(0), group=world.group)
        tensor.copy_(contiguous)


def already_sharded(modules: nn.Module) -> bool:
    """Return whether the user has called `fully_shard` on a part of the model."""
    # Checks a method that FSDP2 adds: importing its class takes two seconds.
    return any(hasattr(module, "set_requires_gradient_sync") for module in modules.modules())


def layout_of(modules: nn.Module) -> ParameterLayout:
    """Return the layout of the parameters: replicas, or some of them in parts over the processes of a rank."""
    if not any(map(is_dtensor, modules.parameters())):
        return ParameterLayout()
    from anybatch.parallel.dtensors import SHARDED  # noqa: PLC0415 (with `DTensor`s it is imported already)

    return SHARDED


def refuse_misplaced(modules: nn.Module, needs: Capabilities, world: World, precision: str) -> None:
    """Refuse parameters split over data-parallel ranks, and split ones that strategy or precision do not support."""
    parts = {name: parameter for name, parameter in modules.named_parameters() if is_dtensor(parameter)}
    if not parts or (already_sharded(modules) and needs.replaces_parameters):
        return
    name = next(iter(parts))
    if already_sharded(modules):
        message = (
            f"parameter {name!r} is sharded over ranks (a DTensor), but strategy {needs.name!r} needs whole ones. Use "
            "strategy='fsdp', which takes models that were sharded with fully_shard, or pass the plain model."
        )
        raise ParameterError(message)
    along = set(world.data_groups[world.data_group])
    for name, parameter in parts.items():
        ranks: list[int] = cast("Any", parameter).device_mesh.mesh.flatten().tolist()
        shared = sorted(along.intersection(ranks))
        if len(shared) > 1:
            message = (
                f"parameter {name!r} is a DTensor over ranks {ranks}. Of these, {shared} are "
                f"data-parallel ranks ({world.size} in all), so ranks that run one model together would get "
                "different samples. Tell the engine the data-parallel dimension of your mesh: "
                "Engine(..., world=ab.World.of_mesh(mesh['dp'])), where mesh = init_device_mesh(device, (num_replicas, "
                "num_parts), mesh_dim_names=('dp', 'tp')); with one replica too. A model sharded over data-parallel "
                "ranks is for fully_shard and strategy='fsdp'."
            )
            raise ParameterError(message)
    if not needs.tensor_parallel:
        message = (
            f"strategy {needs.name!r} does not take tensor-parallel parameters ({name!r} is a DTensor): torch's "
            "DistributedDataParallel cannot put them into buckets with plain ones, and 'single' compares nothing "
            "between processes. Use strategy='all_reduce', 'zero1' or 'fsdp'."
        )
        raise CompositionError(message)
    if precision == "fp16":
        message = (
            f"precision='fp16' does not take tensor-parallel parameters ({name!r} is a DTensor): torch's GradScaler "
            "would look for overflow in each process's parts alone. Use precision='bf16'."
        )
        raise CompositionError(message)


_WHOLE_UPDATES = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP"})
"""Optimizers whose update of a number depends on the other numbers of its parameter."""


def refuse_whole_updates(optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
    """Raise a `CompositionError` for an optimizer that needs whole parameters if each process has a part of them."""
    parts = {id(parameter) for parameter in updated if not is_whole(parameter)}
    for one in getattr(optimizer, "optimizers", (optimizer,)):
        names = _WHOLE_UPDATES.intersection(kind.__name__ for kind in type(one).__mro__)
        if names and any(id(parameter) in parts for group in one.param_groups for parameter in group["params"]):
            message = (
                f"{type(one).__name__} computes the update of a parameter from all of it, but each process has a part "
                "(a DTensor) of some: the sums would be rounded differently, or the step would fail. Use "
                "strategy='zero1', which updates each parameter as a whole on one rank, or an optimizer that updates "
                "each number independently, such as AdamW."
            )
            raise CompositionError(message)


def refuse_joined_kernels(optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
    """Raise a `CompositionError` for one kernel (foreach, fused) over plain parameters and `DTensor`s.

    Torch does not support this mixture.
    """
    if len({is_dtensor(parameter) for parameter in updated}) < 2:  # noqa: PLR2004 (one kind)
        return
    for number, group in enumerate(optimizer.param_groups):
        named = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if named is not None and len({is_dtensor(parameter) for parameter in group["params"]}) > 1:
            message = (
                f"{type(optimizer).__name__}({named}=True) updates the parameters of group {number} in one kernel, and "
                f"only some of them are DTensors, which torch refuses. Leave {named}=True out, or put the DTensors "
                "into a separate parameter group."
            )
            raise CompositionError(message)
