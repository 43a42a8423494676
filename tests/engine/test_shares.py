"""The user's own loaders: ranks agree on the end, and empty shares count nothing."""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import anybatch as ab
from anybatch.core.batch import Position
from anybatch.errors import DataError, RankFailedError
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, classify, cut, perceptron, sgd_engine, vectors
from tests.faults import sees
from tests.raising import warns
from tests.ranks_fixture import Ranks


def train_on_uneven_loaders(strategy: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Run on every rank: rank r brings 4 - r batches; return the parameters and the plan of each step."""
    world = ab.World.from_environment()
    own = [cut(whole, *bounds[world.rank]) for whole, bounds in rounds(world.size) if world.rank < len(bounds)]
    model = perceptron()
    with sgd_engine(model, micro_batch_size=2, strategy=STRATEGIES[strategy](), world=world) as engine:
        plans = [str(engine.step(share).plan) for share in ab.shares(own, world=world)]
    return model.state_dict(), plans


def rounds(world_size: int) -> list[tuple[dict[str, torch.Tensor], list[tuple[int, int]]]]:
    """Return, per step, the full batch and the bounds of the shares of ranks that still have one."""
    found: list[Any] = []
    for number in range(4):
        busy = min(world_size, 4 - number)
        sizes = [3 + rank for rank in range(busy)]
        bounds = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(busy)]
        batch = vectors(40 + number)
        found.append((cut(batch, 0, sum(sizes)), bounds))
    return found


@sees(
    "shares are divided by this rank's samples",
    "src/anybatch/engine/micro_batches.py",
    "divisors = (float(planned.plan.num_samples),) * num_terms",
    "divisors = (float(sum(unit.num_samples for unit in planned.units)) or 1.0,) * num_terms",
    cases=["2-ranks"],
    also=[
        "tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[2-ranks-ragged]",
        "tests/examples/test_ladder_against_engine.py::test_all_reduce",
    ],
)
@sees(
    "shares end with the first rank's loader",
    "src/anybatch/engine/shares.py",
    "if not any(row[0] for row in num_loaded):",
    "if not all(row[0] for row in num_loaded):",
    cases=["2-ranks"],
)
def test_a_finished_rank_does_not_stop_the_others(ranks: Ranks) -> None:
    """Ranks with 4, 3 and 2 batches make 4 steps, each equal to the plain step on the given batches."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for whole, _ in rounds(ranks.world_size):
        optimizer.zero_grad()
        classify(model, whole).backward()
        optimizer.step()

    for strategy in ("all_reduce", "ddp"):
        for state, plans in ranks.run(train_on_uneven_loaders, strategy):
            assert len(plans) == 4
            assert relative_error(state, model.state_dict()) <= 1e-12


def test_a_sampler_that_pads_warns() -> None:
    """If DistributedSampler pads with duplicates, a warning gives their number and an alternative."""
    dataset = TensorDataset(torch.zeros(10, 2))

    def loader(*, drop_last: bool) -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=4, rank=0, drop_last=drop_last)
        return DataLoader(dataset, batch_size=2, sampler=sampler)

    with pytest.warns(UserWarning, match=r"pads 10 samples with 2 duplicates .* 4 ranks get 3 each.*ab\.batches"):
        assert len(list(ab.shares(loader(drop_last=False), world=ab.World()))) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(ab.shares(loader(drop_last=True), world=ab.World()))
        list(ab.shares([1, 2], world=ab.World()))


def train_on_joined(sizes_of_ranks: list[list[int]], effective_batch_size: int) -> tuple[list[int], torch.Tensor]:
    """Run on every rank: join batches of these sizes; return the samples of each step, and the parameters."""
    world = ab.World.from_environment()
    # Ranks hold consecutive samples, so the order of samples in a step is known.
    ends = list(itertools.accumulate(sum(sizes) for sizes in sizes_of_ranks))
    whole = vectors(ends[-1])
    start = ends[world.rank] - sum(sizes_of_ranks[world.rank])
    own = list(itertools.accumulate(sizes_of_ranks[world.rank], initial=start))
    loader = [cut(whole, *bounds) for bounds in itertools.pairwise(own)]
    model = perceptron()
    with sgd_engine(model, micro_batch_size=3, effective_batch_size=effective_batch_size, world=world) as engine:
        shares = ab.shares(loader, effective_batch_size=effective_batch_size, world=world)
        sizes = [engine.step(share).num_samples for share in shares]
    return sizes, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def plain_steps(num_samples: int, steps: list[list[int]]) -> torch.Tensor:
    """Return the parameters after plain steps on these samples."""
    whole, model = vectors(num_samples), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ids in steps:
        optimizer.zero_grad()
        classify(model, {name: value[ids] for name, value in whole.items()}).backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@sees(
    "the rest of a split batch is lost",
    "src/anybatch/engine/shares.py",
    "rest = slice_samples(self._joined, number, self.num_read)",
    "self.num_read = number",
)
def test_batches_of_a_loader_are_joined_to_the_given_size() -> None:
    """Batches of 4 are re-cut to steps of 6; the last step is smaller."""
    sizes, found = train_on_joined([[4, 4, 4, 4, 3]], 6)
    expected = plain_steps(19, [list(range(k, min(k + 6, 19))) for k in range(0, 19, 6)])
    assert sizes == [6, 6, 6, 1]
    assert relative_error({"all": found}, {"all": expected}) <= 1e-12


def test_ranks_join_their_loaders(two_ranks: Ranks) -> None:
    """On two ranks each joins half of a step; when one loader ends, the other fills the step."""
    steps = [[*range(3), *range(15, 18)], [*range(3, 6), *range(18, 20), 6], [*range(7, 13)], [13, 14]]
    expected = plain_steps(20, steps)
    for sizes, found in two_ranks.run(train_on_joined, [[4, 4, 7], [2, 3]], 6):
        assert sizes == [6, 6, 6, 2]
        assert relative_error({"all": found}, {"all": expected}) <= 1e-12


def joined_in_vain() -> tuple[int, str]:
    """Run on every rank: batches of rank 1 cannot be joined; return the number of earlier shares, and the error."""
    world = ab.World.from_environment()
    widths = [5, 5, 5, 7] if world.rank else [5] * 4
    loader = [{"x": torch.zeros(2, width)} for width in widths]
    found: list[Any] = []
    with pytest.raises((DataError, RankFailedError)) as caught:
        found.extend(ab.shares(loader, effective_batch_size=8, world=world))
    return len(found), f"{type(caught.value).__name__}: {caught.value}"


def test_batches_that_cannot_be_joined_are_refused_on_all_ranks(two_ranks: Ranks) -> None:
    """If one rank cannot join its part of a step, no rank gets a share of it."""
    (of_first, first), (of_second, second) = two_ranks.run(joined_in_vain)

    assert (of_first, of_second) == (1, 1)
    assert first.startswith("RankFailedError: rank 1 failed"), first
    assert second.startswith("DataError: batches of a loader cannot be joined"), second


def step_from_different_places() -> str:
    """Run on every rank: rank 1 has set a different position; return the error."""
    world = ab.World.from_environment()
    model = perceptron()
    engine = sgd_engine(model, micro_batch_size=2, world=world)
    engine.position = Position(0, 38 * world.rank)
    with pytest.raises(DataError) as caught:
        engine.step(vectors(4))
    return str(caught.value)


@sees(
    "ranks in different steps plan one batch together",
    "src/anybatch/engine/micro_batches.py",
    "if position != rows[0][1:]:",
    "if place != place:",
)
def test_ranks_at_different_positions_are_refused(two_ranks: Ranks) -> None:
    """Ranks at different positions in their data are refused on all ranks before the step runs."""
    for message in two_ranks.run(step_from_different_places):
        assert "rank 0 is at sample 0 of its data, rank 1 at sample 38" in message
        assert "iterate ab.shares(loader)" in message


class DividedByRank(torch.utils.data.IterableDataset[torch.Tensor]):
    """Every n-th row for rank r of n, as `split_dataset_by_node` divides a stream, or all rows."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.numbers = range(rank, 24, world_size)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:  # type: ignore[override]
        whole = vectors(24)
        return ({name: value[number] for name, value in whole.items()} for number in self.numbers)


def step_a_stream(is_divided: bool) -> str:
    """Run on every rank: step a stream; return the error."""
    world = ab.World.from_environment()
    model = perceptron()
    options: dict[str, Any] = {"micro_batch_size": 2, "world": world}
    data = DividedByRank(*((world.rank, world.size) if is_divided else (0, 1)))
    try:
        engine = sgd_engine(model, **options)
        for batch in ab.batches(data, effective_batch_size=6, shuffle=False):
            engine.step(batch)
    except DataError as error:
        return str(error)
    return ""


def test_a_stream_divided_by_rank_is_refused(two_ranks: Ranks) -> None:
    """`ab.batches` reads the full stream on each rank, so a stream that divides itself is refused on every rank."""
    for rank, message in enumerate(two_ranks.run(step_a_stream, True)):
        assert f"rank {rank} has different samples in its stream than rank {1 - rank}" in message
    assert two_ranks.run(step_a_stream, False) == ["", ""]


@pytest.mark.parametrize("size", [2, 3, 4, 6, 7])
def test_a_loader_may_reuse_its_memory(size: int) -> None:
    """Batches in a buffer that the loader reuses are joined and split correctly."""

    def loader() -> Iterator[dict[str, Any]]:
        buffer, names = torch.zeros(4), [0] * 4
        for k in range(0, 20, 4):
            torch.arange(k, k + 4, out=buffer)
            names[:] = range(k, k + 4)
            yield {"x": buffer, "names": names}

    found, named = [], []
    for share in ab.shares(loader(), effective_batch_size=size, world=ab.World()):
        batch: Any = share.batch
        found += batch["x"].tolist()
        named += batch["names"]
    assert found == named == list(range(20))


class EvenBatches(torch.utils.data.BatchSampler):
    """The attributes by which Accelerate's `BatchSamplerShard` is recognised."""

    def __init__(self, num_samples: int, *, even_batches: bool) -> None:
        super().__init__(range(num_samples), batch_size=4, drop_last=False)
        self.batch_sampler, self.even_batches = (
            torch.utils.data.BatchSampler(range(num_samples), 4, False),
            even_batches,
        )
        self.num_processes, self.split_batches = 2, False


class EvenStream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """The attributes of Accelerate's `IterableDatasetShard`."""

    def __init__(self, source: Any) -> None:
        self.dataset, self.num_processes, self.batch_size, self.drop_last = source, 2, 4, False

    def __iter__(self) -> Any:
        return iter(self.dataset)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (lambda data: DataLoader(data, batch_sampler=EvenBatches(len(data), even_batches=True)), "with 6 duplicates"),
        (lambda data: DataLoader(data, batch_sampler=EvenBatches(len(data), even_batches=False)), None),
        (lambda data: DataLoader(EvenStream(data), batch_size=4), "with 6 duplicates"),
        (lambda data: DataLoader(EvenStream(iter(data)), batch_size=4), "if they do not fill"),
    ],
)
def test_repeated_samples_are_found_by_attributes(loader: Any, said: str | None) -> None:
    """Without Accelerate installed: ten samples for two ranks in batches of four need six duplicates."""
    data = [{"x": torch.tensor([float(k)])} for k in range(10)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in ab.shares(loader(data)):
            break

    messages = [str(one.message) for one in caught if "Accelerate" in str(one.message)]
    assert len(messages) == (said is not None)
    assert said is None or said in messages[0]


def steps_of_small_data(num_samples: int, size: int, **options: Any) -> list[int]:
    """Return the number of samples of each step in two epochs."""
    model = perceptron()
    whole = vectors(num_samples)
    data = [{name: value[k] for name, value in whole.items()} for k in range(num_samples)]
    with sgd_engine(model, micro_batch_size=8, **options) as engine:
        loop = ab.batches(data, effective_batch_size=size, epochs=2)
        return [engine.step(batch).num_samples for batch in loop]


@pytest.mark.parametrize("options", [{}, {"effective_batch_size": 32}])
def test_data_smaller_than_the_effective_batch_warn(options: dict[str, int]) -> None:
    """A data set that never fills a step causes one warning with both numbers; a short last step causes none."""
    with warns("smaller_batches"):
        assert steps_of_small_data(20, 32, **options) == [20, 20]
    assert steps_of_small_data(40, 32, **options) == [32, 8] * 2
    assert steps_of_small_data(32, 32, **options) == [32] * 2
