"""Assigns the parts of a state to processes: each part once, about equal bytes per process."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anybatch.checkpoints.structure import TensorPart
from anybatch.errors import CheckpointError

Place = tuple[str, tuple[int, ...]]
"""The name of a tensor, and where a part of it begins."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a tensor that a process has; `whole` is the shape of the tensor."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    num_bytes: int


def held_parts(parts: Mapping[str, TensorPart]) -> list[HeldPart]:
    """Return the descriptions of a process's parts; empty parts only if the tensor is empty."""
    return [
        HeldPart(name, held.offset, tuple(held.part.shape), held.shape, held.part.nbytes)
        for name, held in parts.items()
        if held.part.numel() or not math.prod(held.shape)
    ]


def assign_parts(told: Sequence[Sequence[HeldPart]]) -> list[list[Place]]:
    """Return the parts that each process writes; equal on all processes.

    What several processes have (replicas) is dealt to the one with the fewest bytes so far, the largest part first.
    """
    holders: dict[Place, list[int]] = defaultdict(list)
    known: dict[Place, HeldPart] = {}
    for process, held in enumerate(told):
        for part in held:
            place = part.name, part.offset
            holders[place].append(process)
            _refuse_unless_whole(part.name, known.setdefault(place, part).shape == part.shape)
    numbers: dict[str, int] = defaultdict(int)
    for part in known.values():
        numbers[part.name] += math.prod(part.shape)
    for part in known.values():
        _refuse_unless_whole(part.name, numbers[part.name] == math.prod(part.whole))
    dealt: list[list[Place]] = [[] for _ in told]
    num_bytes = [0] * len(told)
    for place in sorted(known, key=lambda place: (-known[place].num_bytes, place)):
        process = min(holders[place], key=lambda process: (num_bytes[process], process))
        dealt[process].append(place)
        num_bytes[process] += known[place].num_bytes
    return dealt


def _refuse_unless_whole(name: str, holds: bool) -> None:  # noqa: FBT001 (a condition, as in assert)
    if not holds:
        message = (
            f"the parts of {name!r} that processes hold do not make up the whole tensor: its layout is not one that "
            "can be saved in parts. Save whole tensors: engine.save(folder, sharded=False)."
        )
        raise CheckpointError(message)
