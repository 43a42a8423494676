"""Each hand-written program of the ladder gives the engine's gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from tests.engine.cases import InMemory
from tests.examples.ladder import (
    EXACT,
    add_up,
    adder,
    classify,
    distance,
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
            work = dist.all_reduce(flat, group=self._world.group, async_op=True)
""",
    """
            work = dist.all_reduce(flat.div_(self._world.size), group=self._world.group, async_op=True)
""",
    also=["tests/engine/test_exactness.py::test_gradient_is_that_of_the_unsplit_batch[2-ranks-ragged]"],
)
def test_all_reduce(three_ranks: Ranks) -> None:
    """On three ranks with shares of 11, 11 and 10: sum over count is the engine's gradient, mean of means is not."""
    for right, wrong in three_ranks.run(all_reduced):
        assert right <= EXACT
        assert wrong > 1e-3


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
