"""Gather rows of several tensors from all ranks in one collective."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from anybatch.parallel.world import World


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The shape of a tensor's rows, without the first axis, and their dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GatherBuffers:
    """The send and receive memory of a gather, as bytes.

    Attributes:
        sent: rows of this rank, padded to the bytes of the rank with the most rows.
        received: rows of all ranks, rank by rank.
    """

    sent: torch.Tensor
    received: torch.Tensor


def make_gather_buffers(layouts: Sequence[RowLayout], sizes: Sequence[int], world: World) -> GatherBuffers | None:
    """Allocate the buffers of `gather_rows` for the row layouts and each rank's number of rows; None on one rank.

    Separate from the gather, because a rank that runs out of memory within the gather would leave the others waiting.
    """
    if world.size == 1:
        return None
    # Every rank sends the same number of bytes, the largest share: an all-gather needs equal shares.
    sent = torch.zeros(max(sizes) * sum(layout.num_bytes for layout in layouts), dtype=torch.uint8, device=world.device)
    return GatherBuffers(sent, sent.new_empty(world.size * len(sent)))


def gather_rows(
    pieces: Sequence[Sequence[torch.Tensor]],
    layouts: Sequence[RowLayout],
    sizes: Sequence[int],
    world: World,
    notify: Callable[[int], AbstractContextManager[object]],
    *,
    buffers: GatherBuffers | None,
) -> list[torch.Tensor]:
    """Return each tensor with the rows of all ranks, rank by rank.

    Everything travels as bytes in one buffer, so that tensors of several types and ranks with different numbers of
    rows, or none, take one all-gather.

    Args:
        pieces: this rank's pieces, in row order; each has one tensor (rows, *shape) per layout.
        layouts: layout of each tensor's rows, the same on all ranks.
        sizes: number of rows of each rank.
        world: the ranks.
        notify: function (number of bytes that this rank sends) -> context around the collective.
        buffers: result of `make_gather_buffers`.
    """
    if buffers is None:
        return [torch.cat(columns) for columns in zip(*pieces, strict=True)]
    sent, received, most = buffers.sent, buffers.received, max(sizes)
    start = 0
    for number, layout in enumerate(layouts):
        own = sent[start : start + sizes[world.rank] * layout.num_bytes]
        if len(own):
            _fill(own, [_as_bytes(piece[number]) for piece in pieces])
        start += most * layout.num_bytes
    with notify(len(sent)), world.collective():
        # The chunks are views, so every rank's bytes arrive in place, without a copy.
        dist.all_gather(list(received.chunk(world.size)), sent, group=world.group)
    found, start = [], 0
    by_rank = received.unflatten(0, (world.size, -1))
    for layout in layouts:
        parts = [by_rank[rank, start : start + size * layout.num_bytes] for rank, size in enumerate(sizes)]
        found.append(torch.cat(parts).view(layout.dtype).reshape(sum(sizes), *layout.shape))
        start += most * layout.num_bytes
    return found


def _fill(buffers: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy pieces into a flat tensor, one after another, without an intermediate tensor."""
    start = 0
    for piece in pieces:
        buffers[start : start + len(piece)].copy_(piece)
        start += len(piece)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements, row by row, as a flat tensor of bytes."""
    # As bytes, so that tensors of different dtypes can travel in one message.
    return tensor.detach().contiguous().flatten().view(torch.uint8)
