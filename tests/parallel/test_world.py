"""The world: rank and size from the launcher's variables, and collectives of the control plane."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.world import World, make_grid
from tests.faults import sees
from tests.ranks_fixture import Ranks


def test_without_a_launcher_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RANK and WORLD_SIZE there is a single rank, which gathers alone and needs no process group."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = World.from_environment(device="cpu")

    assert (world.rank, world.size, world.connected) == (0, 1, False)
    assert world.gather_numbers([1.0, 2.0]) == [[1.0, 2.0]]
    assert world.gather_objects("a") == ["a"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("variables", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_half_a_launcher_is_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inconsistent variables are refused before any rank waits."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError):
        World.from_environment(device="cpu")


def gathered() -> tuple[int, int, list[list[float]], list[object], list[float]]:
    """Run on every rank: gather numbers and objects, and start a sum."""
    world = World.from_environment(device="cpu")
    numbers = torch.tensor([world.rank, 1.0, -0.5], dtype=torch.float64)
    work = world.start_sum(numbers)
    if work is not None:
        work.wait()
    mine = [world.rank / 3, 2.0**53]
    return (
        world.rank,
        world.size,
        world.gather_numbers(mine),
        world.gather_objects({"rank": world.rank}),
        numbers.tolist(),
    )


@sees(
    "numbers that all ranks sum are not summed",
    "src/anybatch/parallel/control.py",
    "self._messenger.start_sum(numbers)",
    "self._messenger.start_sum(numbers.clone())",
    cases=["2-ranks"],
)
def test_everybody_learns_what_everybody_said(ranks: Ranks) -> None:
    """Gathered numbers are float64 in rank order; objects and sums are exact."""
    size = ranks.world_size
    for rank, found in enumerate(ranks.run(gathered)):
        assert found[:2] == (rank, size)
        assert found[2] == [[other / 3, 2.0**53] for other in range(size)]
        assert found[3] == [{"rank": other} for other in range(size)]
        assert found[4] == [sum(range(size)), size, -0.5 * size]


def broken() -> list[str]:
    """Run on every rank: return the errors after different exceptions in a collective."""
    world = dataclasses.replace(World.from_environment(device="cpu"))
    said = []
    for error in (RuntimeError("connection closed"), torch.OutOfMemoryError("no room"), ValueError("mine")):
        with pytest.raises((RuntimeError, ValueError)) as caught, world.collective():
            raise error
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_only_what_torch_raises_counts_as_broken(two_ranks: Ranks) -> None:
    """A RuntimeError in a collective means that another rank failed; out of memory and other errors stay unchanged."""
    for collective, memory, own in two_ranks.run(broken):
        assert collective.startswith(RankFailedError.__name__)
        assert "connection closed" in collective
        assert memory == "OutOfMemoryError: no room"
        assert own == "ValueError: mine"


class Unpicklable:
    """A value whose pickling fails with the class of error that torch raises for a broken connection."""

    def __reduce__(self) -> str:
        message = "this value cannot be pickled"
        raise RuntimeError(message)


def unpicklable() -> str:
    """Run on every rank: gather a value that cannot be pickled, and return the error."""
    with pytest.raises(RuntimeError) as caught:
        World.from_environment(device="cpu").gather_objects(Unpicklable())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_value_that_cannot_be_pickled_is_not_blamed_on_another_rank(two_ranks: Ranks) -> None:
    """The rank that cannot pickle its value gets that error, at once."""
    assert two_ranks.run(unpicklable) == ["RuntimeError: this value cannot be pickled"] * 2


def gathered_without_numpy() -> list[object]:
    """Run on every rank: gather objects of different sizes with numpy conversion disabled."""
    world = World.from_environment(device="cpu")
    with mock.patch.object(torch.Tensor, "numpy", side_effect=RuntimeError("Numpy is not available")):
        return world.gather_objects(["a" * 1000 * world.rank, None, {world.rank: 1.5}])


def test_ranks_need_no_numpy(three_ranks: Ranks) -> None:
    """Torch does not require numpy, so ranks gather short and long objects without it."""
    expected = [["a" * 1000 * rank, None, {rank: 1.5}] for rank in range(3)]
    assert three_ranks.run(gathered_without_numpy) == [expected] * 3


@pytest.mark.parametrize(
    "told", [[(0, (0, 1)), (1, (0, 1)), (0, (2,))], [(0, (0, 1)), (1, (0, 1)), (0, (0, 1)), (1, (0, 1))]]
)
def test_dimensions_that_are_no_mesh_are_refused(told: list[tuple[int, tuple[int, ...]]]) -> None:
    """Dimensions that do not form one mesh are refused, because gradients of different parts would be summed."""
    mesh: Any = None
    with pytest.raises(WorldError):
        make_grid(0, mesh, told)
    crossed = [(0, (0, 3)), (0, (1, 2)), (1, (1, 2)), (1, (0, 3))]  # the mesh [[0, 1], [3, 2]]
    assert make_grid(2, mesh, crossed).model_groups == ((0, 1), (3, 2))
    assert [make_grid(process, mesh, crossed).data_group for process in range(4)] == [0, 1, 1, 0]
