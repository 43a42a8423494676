"""Replicas start equal: digests find differences between ranks, which are then overwritten or refused."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from anybatch.errors import ReplicaError
from anybatch.parallel.local_parts import is_whole, local_part
from anybatch.parallel.world import World

Initial = Literal["broadcast", "verify"]
_BLOCK_WORDS = 1 << 18  # 2 MiB at a time, so that the mixed words stay in a cache
# Signed, since torch computes with signed 64-bit integers only.
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def align_replicas(modules: nn.Module, world: World, initial: Initial) -> tuple[str, ...]:
    """Make parameters and buffers equal on all ranks, or refuse; return the names of the overwritten tensors.

    "broadcast" overwrites differing tensors with rank 0's values; "verify" raises instead.

    Raises:
        ReplicaError: values differ under "verify". Names, shapes and types have been compared before.
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
