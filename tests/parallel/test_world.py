"""The world: rank and size from the launcher's variables, and collectives of the control plane."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import anybatch as ab
from anybatch.errors import ParameterError, RankFailedError, WorldError
from anybatch.parallel.agreement import StepAgreement
from anybatch.parallel.world import World
from tests.faults import sees
from tests.raising import raises
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
def test_incomplete_variables_are_refused(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inconsistent variables are refused before any rank waits."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError):
        World.from_environment(device="cpu")


def gathered() -> tuple[int, int, list[list[float]], list[object]]:
    """Run on every rank: gather numbers and objects."""
    world = World.from_environment(device="cpu")
    mine = [world.rank / 3, 2.0**53]
    return world.rank, world.size, world.gather_numbers(mine), world.gather_objects({"rank": world.rank})


@sees(
    "messenger: rows overwrite earlier ones",
    "src/anybatch/parallel/control.py",
    "step.first_row * row_bytes : (step.first_row + step.num_rows) * row_bytes",
    "0 : step.num_rows * row_bytes",
    cases=["3-ranks"],
)
def test_all_ranks_gather_the_same_values(ranks: Ranks) -> None:
    """Gathered numbers are float64 in rank order, and objects are exact."""
    size = ranks.world_size
    rows = [[other / 3, 2.0**53] for other in range(size)]
    for rank, found in enumerate(ranks.run(gathered)):
        assert found == (rank, size, rows, [{"rank": other} for other in range(size)])


def agreed() -> tuple[list[float], list[bool]]:
    """Run on every rank: send numbers and flags with the message of a step."""
    world = World.from_environment(device="cpu")
    numbers = torch.tensor([world.rank, 1.0, -0.5], dtype=torch.float64)
    agreement = StepAgreement(numbers, [False, world.rank == 0, True], world)
    agreement.start()
    sums, flags = agreement.wait()
    return sums.tolist(), flags


@sees(
    "numbers of all ranks are not summed",
    "src/anybatch/parallel/agreement.py",
    "total + x for total, x",
    "x for total, x",
    cases=["2-ranks"],
)
def test_numbers_are_summed_and_flags_joined(ranks: Ranks) -> None:
    """The message of a step sums numbers over ranks, and a flag that one rank has set is set on all."""
    size = ranks.world_size
    expected = [float(sum(range(size))), size, -0.5 * size], [False, True, True]
    assert ranks.run(agreed) == [expected] * size


def broken() -> list[str]:
    """Run on every rank: return the errors after different exceptions in a collective."""
    world = dataclasses.replace(World.from_environment(device="cpu"))
    said = []
    for error in (RuntimeError("connection closed"), torch.OutOfMemoryError("no room"), ValueError("mine")):
        with pytest.raises((RuntimeError, ValueError)) as caught, world.collective():
            raise error
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_only_errors_of_torch_count_as_broken(two_ranks: Ranks) -> None:
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
    """The rank that cannot pickle its value gets that error immediately."""
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


def tensor_parallel() -> None:
    """Run on every rank: build an engine around a model whose layers are split over the ranks."""
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), {"0": ColwiseParallel()})
    with raises(ParameterError, "split_parameter"):
        ab.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), ab.mean_over_samples(torch.mean))


def test_tensor_parallel_parameters_are_refused(two_ranks: Ranks) -> None:
    """Ranks that run one model together would get different samples, so a split layer is refused."""
    two_ranks.run(tensor_parallel)
