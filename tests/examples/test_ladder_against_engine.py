"""Each hand-written program of the ladder gives the engine's gradient."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import anybatch as ab
from anybatch.parallel.replicas import align_replicas
from tests.engine.cases import InMemory
from tests.examples.ladder import (
    EXACT,
    add_up,
    adder,
    classify,
    distance,
    parameters_of,
    predict,
    program,
    rows_of_numbers,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks


def engine_gradient(model: nn.Module, loss: Any, batch: Any, **options: Any) -> Tensor:
    """Return the engine's gradient of a batch as one vector."""
    with ab.Engine(model, torch.optim.SGD(model.parameters()), loss, **options) as engine:
        found = engine.gradients(batch)
    return torch.cat([gradient.flatten() for gradient in found.values() if gradient is not None])


@pytest.mark.parametrize(("number", "arguments"), [(1, ()), (2, (16,)), (3, (16,))])
def test_spirals(number: int, arguments: tuple[int, ...]) -> None:
    """The plain loop, equal micro-batches and a ragged tail give the engine's gradient."""
    ladder = program(number)
    points, labels = ladder.spirals(33 if number == 3 else 96, seed=0)
    exact = {"exact": True} if number == 3 else {}

    by_hand = ladder.gradient(ladder.make_model(), points, labels, *arguments, **exact)
    batch = {"points": points, "labels": labels}
    by_engine = engine_gradient(ladder.make_model(), ab.mean_over_samples(classify), batch, micro_batch_size=7)

    assert distance(by_engine, by_hand) <= EXACT


@pytest.mark.slow
def test_trained_parameters() -> None:
    """Fifty accumulated optimizer steps by hand and by the engine give the same parameters."""
    ladder = program(2)
    by_hand = ladder.train(ladder.make_model(), 50, 16)
    model = ladder.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)

    with ab.Engine(model, optimizer, ab.mean_over_samples(classify), micro_batch_size=16) as engine:
        for step in range(50):
            points, labels = ladder.spirals(96, seed=step)
            engine.step({"points": points, "labels": labels})

    assert distance(parameters_of(model), by_hand) <= 1e-10


def test_token_mean() -> None:
    """The sum over the count of all targets is the engine's gradient; the mean of means is not."""
    ladder = program(4)
    tokens, labels = ladder.text(32, seed=0)
    loss = ab.mean_over_tokens(predict, shift=False)

    by_engine = engine_gradient(ladder.make_model(), loss, {"tokens": tokens, "labels": labels}, micro_batch_size=8)

    assert distance(ladder.gradient(ladder.make_model(), tokens, labels, 8, exact=True), by_engine) <= EXACT
    assert distance(ladder.gradient(ladder.make_model(), tokens, labels, 8, exact=False), by_engine) > 1e-2


def all_reduced() -> tuple[float, float]:
    """Run on every rank: return the errors of program 5's right and wrong way, relative to the engine."""
    ladder = program(5)
    numbers = rows_of_numbers(32, seed=3)
    loss = ab.mean_over_samples(add_up)
    by_engine = engine_gradient(adder(), loss, InMemory({"numbers": numbers}), micro_batch_size=5)
    ways = [ladder.gradient(adder(), numbers, exact=exact) for exact in (True, False)]
    return distance(ways[0], by_engine), distance(ways[1], by_engine)


@sees(
    "all_reduce averages over ranks",
    "src/anybatch/parallel/all_reduce.py",
    """
            work = dist.all_reduce(flat, async_op=True)
""",
    """
            work = dist.all_reduce(flat.div_(self._world.size), async_op=True)
""",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[2-ranks-ragged]"],
)
def test_all_reduce(three_ranks: Ranks) -> None:
    """On three ranks with shares of 11, 11 and 10: sum over count is the engine's gradient, mean of means is not."""
    for right, wrong in three_ranks.run(all_reduced):
        assert right <= EXACT
        assert wrong > 1e-3


def aligned() -> tuple[list[str], list[str], bool]:
    """Run on every rank: return digests before and after program 6 aligns, and whether the engine does the same."""
    ladder = program(6)
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(8, 1).double()
    torch.manual_seed(dist.get_rank())
    twin = nn.Linear(8, 1).double()
    before = ladder.digests(model)
    ladder.align(model)
    differed = align_replicas(twin, ab.World.from_environment(), "broadcast")
    same = all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))
    return before, ladder.digests(model), same and differed == ("weight", "bias")


def test_parameter_check(three_ranks: Ranks) -> None:
    """Different replicas have different digests and are equal after alignment, as in the engine."""
    for before, after, same in three_ranks.run(aligned):
        assert len(set(before)) == 3
        assert len(set(after)) == 1
        assert same


def dealt() -> tuple[float, float]:
    """Run on every rank: return the errors of program 7's two deals on the last batch of 5, relative to the engine."""
    ladder = program(7)
    numbers = rows_of_numbers(101)
    loss = ab.mean_over_samples(add_up)
    by_engine = engine_gradient(adder(), loss, InMemory({"numbers": numbers[96:]}), micro_batch_size=2)
    errors = []
    for deal in (ladder.exact, ladder.padded):
        ddp = nn.parallel.DistributedDataParallel(adder())
        errors.append(distance(ladder.gradient(ddp, numbers[deal(101, 32)[-1]]), by_engine))
    return errors[0], errors[1]


def test_ddp_with_sampler(two_ranks: Ranks) -> None:
    """Using every sample once gives the engine's gradient; the sampler's padding does not."""
    for exact, padded in two_ranks.run(dealt):
        assert exact <= EXACT
        assert padded > 1e-3


def silently_synchronised() -> list[float]:
    """Run on every rank: return program 8's errors relative to the engine, for different scopes of no_sync."""
    ladder = program(8)
    numbers = rows_of_numbers(33)
    loss = ab.mean_over_samples(add_up)
    by_engine = engine_gradient(adder(), loss, InMemory({"numbers": numbers}), micro_batch_size=5)
    errors = []
    for around in ("nothing", "backward", "forward and backward"):
        ddp = nn.parallel.DistributedDataParallel(adder())
        errors.append(distance(ladder.gradient(ddp, numbers, 5, around), by_engine))
    return errors


def test_no_sync(two_ranks: Ranks) -> None:
    """A wrong scope of no_sync only costs time: the gradient is the engine's."""
    for errors in two_ranks.run(silently_synchronised):
        assert max(errors) <= EXACT


def everything() -> float:
    """Run on every rank: return the error of program 9 relative to the engine."""
    ladder = program(9)
    tokens, labels = ladder.text(33, seed=0)
    make_model = program(4).make_model
    by_hand = ladder.gradient(make_model(), tokens, labels, 4)
    batch = InMemory({"tokens": tokens, "labels": labels})
    loss = ab.mean_over_tokens(predict, shift=False)
    return distance(by_hand, engine_gradient(make_model(), loss, batch, micro_batch_size=5))


def test_all_together(three_ranks: Ranks) -> None:
    """Ragged shares of ragged sentences on three ranks give the engine's gradient with one reduction."""
    assert max(three_ranks.run(everything)) <= EXACT
