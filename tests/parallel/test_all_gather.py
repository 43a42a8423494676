"""`gather_rows` returns the rows of all ranks unchanged, for any dtypes and numbers of rows."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

import anybatch as ab
from anybatch.parallel.agreement import RowLayout, gather_rows, make_gather_buffers
from tests.ranks_fixture import Ranks

KINDS = (
    RowLayout((3,), torch.float64),
    RowLayout((), torch.bool),
    RowLayout((2, 2), torch.bfloat16),
    RowLayout((1,), torch.int64),
    RowLayout((0,), torch.float32),
)


def whole(num_rows: int) -> list[torch.Tensor]:
    """Return one tensor per layout."""
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [torch.randint(-9, 9, (num_rows, *kind.shape), generator=generator) for kind in KINDS]
    return [values.to(kind.dtype) for values, kind in zip(shapes, KINDS, strict=True)]


def gathered(sizes: Sequence[int]) -> list[bool]:
    """Run on every rank: gather in pieces of two rows; return whether each tensor is correct."""
    world = ab.World.from_environment()
    first, tensors = sum(sizes[: world.rank]), whole(sum(sizes))
    stop = first + sizes[world.rank]
    pieces = [[tensor[at : min(at + 2, stop)] for tensor in tensors] for at in range(first, stop, 2)]
    found = gather_rows(
        pieces, KINDS, sizes, world, lambda _: nullcontext(), buffers=make_gather_buffers(KINDS, sizes, world)
    )
    return [torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, tensors, strict=True)]


@pytest.mark.parametrize("weights", [(1, 1, 1), (3, 1, 2), (0, 2, 1), (1, 0, 0)])
def test_rows_come_together(weights: tuple[int, ...], ranks: Ranks) -> None:
    """With even, uneven and zero rows on 1, 2 and 3 ranks, every rank gets all rows in rank order."""
    sizes = [3 * weight for weight in weights[: ranks.world_size]]
    if not sum(sizes):
        sizes[-1] = 1
    for found in ranks.run(gathered, sizes):
        assert found == [True] * len(KINDS)
