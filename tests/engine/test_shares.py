"""The user's own loaders: ranks agree on the end, and empty shares count nothing."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import anybatch as ab
from anybatch.testing import relative_error
from tests.engine.cases import STRATEGIES, classify, cut, perceptron, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks


def train_on_uneven_loaders(strategy: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Run on every rank: rank r brings 4 - r batches; return the parameters and the plan of each step."""
    world = ab.World.from_environment()
    own = [cut(whole, *bounds[world.rank]) for whole, bounds in rounds(world.size) if world.rank < len(bounds)]
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"micro_batch_size": 2, "strategy": STRATEGIES[strategy](), "world": world}
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
        plans = [str(engine.step(share).plan) for share in ab.shares(own, world=world)]
    return model.state_dict(), plans


def rounds(world_size: int) -> list[tuple[dict[str, torch.Tensor], list[tuple[int, int]]]]:
    """Return, per step, the whole batch and the bounds of the shares of those ranks that still bring one."""
    found = []
    for number in range(4):
        busy = min(world_size, 4 - number)
        sizes = [3 + rank for rank in range(busy)]
        bounds = [(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(busy)]
        batch = vectors(40 + number)
        found.append((cut(batch, 0, sum(sizes)), bounds))
    return found


@sees(
    "what ranks bring is divided by this rank's samples",
    "src/anybatch/engine/accumulation/planned_batch.py",
    "divisors = (float(planned.plan.num_samples),) * len(loss.names)",
    "divisors = (float(sum(unit.num_samples for unit in planned.units)) or 1.0,) * len(loss.names)",
    cases=["2-ranks"],
    also=[
        "tests/engine/test_exactness.py::test_gradient_is_that_of_the_unsplit_batch[2-ranks-ragged]",
        "tests/examples/test_ladder_against_engine.py::test_all_reduce",
    ],
)
@sees(
    "shares end with the first rank's loader",
    "src/anybatch/engine/shares.py",
    "if not any(row[0] for row in more):",
    "if not all(row[0] for row in more):",
    cases=["2-ranks"],
)
def test_a_rank_that_is_done_first_does_not_stop_the_others(ranks: Ranks) -> None:
    """Ranks with 4, 3 and 2 batches make 4 steps, each the plain step on what was brought."""
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


def train_with_an_idle_rank(strategy: str) -> dict[str, torch.Tensor]:
    """Run on every rank: the first rank brings three batches, the last one none at all; return the parameters."""
    world = ab.World.from_environment()
    model = perceptron()
    own = [] if world.rank == world.size - 1 else [vectors(5 + number) for number in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"micro_batch_size": 2, "strategy": STRATEGIES[strategy](), "world": world}
    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), **options) as engine:
        for share in ab.shares(own, world=world):
            engine.step(share)
    return model.state_dict()


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_a_rank_may_bring_nothing_from_the_start(strategy: str, two_ranks: Ranks) -> None:
    """Two ranks of which one has an empty loader make the steps of the other one alone."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        classify(model, vectors(5 + number)).backward()
        optimizer.step()

    for state in two_ranks.run(train_with_an_idle_rank, strategy):
        assert relative_error(state, model.state_dict()) <= 1e-12


def test_empty_loaders_make_no_step(two_ranks: Ranks) -> None:
    """Where no rank has a batch, no share is yielded, on one rank or on several."""
    assert list(ab.shares([], world=ab.World())) == []
    assert two_ranks.run(shares_of_nothing) == [0, 0]


def shares_of_nothing() -> int:
    """Run on every rank: return how many shares come of an empty loader."""
    return len(list(ab.shares([], world=ab.World.from_environment())))


def test_a_sampler_that_pads_is_told() -> None:
    """DistributedSampler repeats samples to make ranks even: the warning says how many, and what to use."""
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
