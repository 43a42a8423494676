"""The grid that assigns processes to data-parallel ranks."""

from collections.abc import Sequence
from typing import Any

import pytest

from anybatch.errors import WorldError
from anybatch.parallel.world import RankGrid, make_grid

Told = Sequence[tuple[int, tuple[int, ...]]]


class Dimension:
    """The methods of a mesh dimension that the grid uses."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def size(self) -> int:
        """Return the number of ranks along the dimension."""
        return self._size

    def get_local_rank(self) -> int:
        """Return the rank of this process."""
        return self._rank


def grid_of(process: int, told: Told) -> RankGrid:
    """Return the grid that a process builds from the values of all processes."""
    rank, line = told[process]
    dimension: Any = Dimension(rank, len(line))
    return make_grid(process, dimension, told)


def test_processes_of_a_rank_are_a_model_group() -> None:
    """Model groups are rows or columns of the mesh, depending on its data-parallel dimension."""
    outer = [(0, (0, 2)), (0, (1, 3)), (1, (0, 2)), (1, (1, 3))]
    inner = [(0, (0, 1)), (1, (0, 1)), (0, (2, 3)), (1, (2, 3))]
    assert [grid_of(process, outer).model_groups for process in range(4)] == [((0, 1), (2, 3))] * 4
    assert [grid_of(process, outer).data_group for process in range(4)] == [0, 1, 0, 1]
    assert grid_of(3, inner).model_groups == ((0, 2), (1, 3))
    crossed = [(0, (0, 3)), (0, (1, 2)), (1, (1, 2)), (1, (0, 3))]  # the mesh [[0, 1], [3, 2]]
    assert grid_of(2, crossed).model_groups == ((0, 1), (3, 2))
    assert [grid_of(process, crossed).data_group for process in range(4)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    "told",
    [
        [(0, (0, 1)), (1, (0, 1)), (0, (2,))],
        [(0, (0, 1)), (1, (0, 1)), (0, (0, 1)), (1, (0, 1))],
    ],
    ids=["uneven", "without some"],
)
def test_dimensions_that_are_no_mesh_are_refused(told: Told) -> None:
    """Dimensions that do not form one mesh are refused, because gradients of different parts would be summed."""
    with pytest.raises(WorldError, match="are not slices of one mesh over all ranks"):
        grid_of(0, told)
