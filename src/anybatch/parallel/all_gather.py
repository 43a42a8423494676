"""Rows of tensors from all ranks, brought together in one collective."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a tensor look like: the shape behind its first axis, and the type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Room:
    """Where rows travel from and arrive, as bytes.

    Attributes:
        mine: what this rank hands over.
        everyone: what all ranks hand over, rank by rank.
    """

    mine: torch.Tensor
    everyone: torch.Tensor


def room_for_rows(kinds: Sequence[Rows], sizes: Sequence[int], world: World) -> Room | None:
    """Make room for `gather_rows`, so that it cannot fail for want of memory while others wait; None on one rank."""
    if world.size == 1:
        return None
    mine = torch.zeros(max(sizes) * sum(kind.num_bytes for kind in kinds), dtype=torch.uint8, device=world.device)
    return Room(mine, mine.new_empty(world.size * len(mine)))


def gather_rows(
    pieces: Sequence[Sequence[torch.Tensor]],
    kinds: Sequence[Rows],
    sizes: Sequence[int],
    world: World,
    told: Callable[[int], AbstractContextManager[object]],
    *,
    room: Room | None,
) -> list[torch.Tensor]:
    """Return each tensor with the rows of all ranks, rank by rank.

    Everything travels as bytes in one buffer, so that tensors of several types and ranks with different numbers of
    rows, or none, take one all-gather.

    Args:
        pieces: this rank's pieces, in the order of their rows: one tensor (rows, *shape) per kind in each of them.
        kinds: the same on all ranks.
        sizes: how many rows each rank has.
        world: the ranks.
        told: context of the collective, given the bytes that this rank hands over.
        room: made by `room_for_rows`.
    """
    if room is None:
        return [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    mine, everyone, most = room.mine, room.everyone, max(sizes)
    start = 0
    for number, kind in enumerate(kinds):
        own = mine[start : start + sizes[world.rank] * kind.num_bytes]
        if len(own):
            _fill(own, [_as_bytes(piece[number]) for piece in pieces])
        start += most * kind.num_bytes
    with told(len(mine)), world.collective():
        dist.all_gather(list(everyone.chunk(world.size)), mine)
    found, start = [], 0
    by_rank = everyone.unflatten(0, (world.size, -1))
    for kind in kinds:
        parts = [by_rank[rank, start : start + size * kind.num_bytes] for rank, size in enumerate(sizes)]
        found.append(torch.cat(parts).view(kind.dtype).reshape(sum(sizes), *kind.shape))
        start += most * kind.num_bytes
    return found


def _fill(room: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy pieces into a flat tensor, one behind the other, without a tensor in between."""
    start = 0
    for piece in pieces:
        room[start : start + len(piece)].copy_(piece)
        start += len(piece)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, row by row, as a flat tensor of bytes."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)
