"""Parameters on several ranks: make replicas equal, and refuse unsupported `DTensor`s."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import CompositionError, ParameterError, ReplicaError
from anybatch.parallel.dtensors import is_dtensor, is_whole
from anybatch.parallel.strategy import Capabilities
from anybatch.parallel.world import World

Initial = Literal["broadcast", "verify"]
_BLOCK_WORDS = 1 << 18  # 2 MiB at a time, so that the mixed words stay in a cache
# Signed, since torch computes with signed 64-bit integers only.
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def align_replicas(modules: nn.Module, world: World, initial: Initial) -> tuple[str, ...]:
    """Make parameters and buffers equal on all ranks; return the names of the overwritten tensors.

    Names, shapes and types have been compared before. With initial="verify", raise a `ReplicaError` instead.
    """
    if world.call_tracker is None:  # no other rank
        return ()
    tensors = {**dict(modules.named_parameters()), **dict(modules.named_buffers())}
    digests = world.gather_objects([digest(tensor) for tensor in tensors.values()])
    differing = tuple(name for name, *values in zip(tensors, *digests, strict=True) if len(set(values)) > 1)
    if differing and initial == "verify":
        message = (
            f"{len(differing)} of {len(tensors)} parameters and buffers differ between ranks, first {differing[0]!r}. "
            "Seed every rank alike before building the model, or use initial='broadcast' to take rank 0's values."
        )
        ranks = tuple(rank for rank, row in enumerate(digests) if row != digests[0])
        raise ReplicaError(message, ranks=ranks, names=differing)
    # All ranks see all digests, so all of them broadcast the same tensors in the same order.
    for name in differing:
        with torch.no_grad():
            # A collective needs contiguous memory, but the parameter keeps its strides (such as channels-last).
            contiguous = tensors[name].detach().to(world.device).contiguous()
            dist.broadcast(contiguous, src=0)
            tensors[name].copy_(contiguous)
    return differing


def digest(tensor: torch.Tensor) -> int:
    """Return a 64-bit fingerprint of a tensor's bytes, computed on its device.

    It is the sum, modulo 2**64, of all 64-bit words, each mixed with its position. Mixing is one-to-one, so a changed
    word changes the sum, and not linear, so swapped words change it too. It detects accidents, not attacks.

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


def already_sharded(modules: nn.Module) -> bool:
    """Return whether the user has called `fully_shard` on a part of the model."""
    # Checks a method that FSDP2 adds: importing its class takes two seconds.
    return any(hasattr(module, "set_requires_gradient_sync") for module in modules.modules())


def check_placement(modules: nn.Module, capabilities: Capabilities) -> None:
    """Refuse `DTensor`s: models sharded with `fully_shard` need strategy "fsdp", other `DTensor`s are unsupported."""
    name = next((name for name, parameter in modules.named_parameters() if is_dtensor(parameter)), None)
    if name is None or (already_sharded(modules) and capabilities.replaces_parameters):
        return
    if already_sharded(modules):
        message = (
            f"parameter {name!r} is sharded over ranks (a DTensor), but strategy {capabilities.name!r} needs complete "
            "parameters. Use strategy='fsdp', which takes models that were sharded with fully_shard, or pass the "
            "plain model."
        )
    else:
        message = (
            f"parameter {name!r} is a DTensor, as parallelize_module makes them for tensor parallelism, which the "
            "engine does not support. Pass the plain model; strategy='fsdp' shards it."
        )
    raise ParameterError(message, code="split_parameter")


_WHOLE_UPDATES = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP"})
"""Optimizers whose update of an element depends on the other elements of its parameter."""


def check_whole_updates(optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
    """Raise a `CompositionError` for an optimizer that needs whole parameters, if some `updated` are sharded."""
    parts = {id(parameter) for parameter in updated if not is_whole(parameter)}
    for each in getattr(optimizer, "optimizers", (optimizer,)):
        names = _WHOLE_UPDATES.intersection(kind.__name__ for kind in type(each).__mro__)
        if names and any(id(parameter) in parts for group in each.param_groups for parameter in group["params"]):
            message = (
                f"{type(each).__name__} needs complete parameters for its update, but some are sharded (a DTensor). "
                "The sums would be rounded differently, or the step would fail. Use "
                "strategy='zero1', which updates each parameter as a whole on one rank, or an optimizer that updates "
                "each element independently, such as AdamW."
            )
            raise CompositionError(message)
