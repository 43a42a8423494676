"""When one rank fails, the others end soon after, with its error."""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.batch import LaterUnits, Positions
from anybatch.errors import NonFiniteError
from anybatch.testing import run_ranks
from tests.engine.cases import STRATEGIES, Batch, InMemory, classify, cut, perceptron, sgd_engine, vectors

FAILING_STEP, TIMEOUT_SECONDS = 1, 100.0
MESSAGE = "sample 17 is unreadable"


class Failure(NamedTuple):
    """Where the last rank fails and whether it is killed, under which strategy, and whether all had failed before."""

    strategy: str
    world_size: int
    where: Literal["forward", "feed", "loader"] = "forward"
    is_killed: bool = False
    went_on: bool = False


FAILURES: Mapping[str, Failure] = {
    "raises, all_reduce": Failure("all_reduce", 3, went_on=True),
    "killed, all_reduce": Failure("all_reduce", 2, is_killed=True),
    "the feed raises, ddp": Failure("ddp", 2, "feed"),
    "the loader raises, all_reduce": Failure("all_reduce", 2, "loader"),
}


def fail(failure: Failure) -> None:
    """Kill this process, or raise."""
    if failure.is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(MESSAGE)  # torch raises this type too, also if a collective breaks


def train(failure: Failure) -> int:
    """Run on every rank: train until the last rank fails, in its second step."""
    world = ab.World.from_environment()
    batch = vectors(6 * world.size)

    def come_to(where: str) -> None:
        if (failure.where, engine.num_steps, world.rank) == (where, FAILING_STEP, world.size - 1):
            fail(failure)

    def loss(model: nn.Module, part: Batch) -> torch.Tensor:
        come_to("forward")
        return classify(model, part)

    class Broken(InMemory):
        def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
            come_to("feed")
            return super().feed(units, later_units)

    def loader() -> Iterator[Batch]:
        for _ in range(3):
            come_to("loader")
            yield cut(batch, 6 * world.rank, 6 * world.rank + 6)

    model = perceptron()
    strategy = STRATEGIES[failure.strategy]()
    engine = sgd_engine(model, loss, micro_batch_size=2, strategy=strategy, world=world)
    if failure.went_on:
        with pytest.raises(NonFiniteError):
            engine.step(InMemory({**batch, "x": batch["x"] * float("nan")}))
    for share in ab.shares(loader(), world=world) if failure.where == "loader" else [Broken(batch)] * 3:
        engine.step(share)
    return engine.num_steps


@pytest.mark.ranks
@pytest.mark.parametrize("name", FAILURES)
def test_the_others_end_with_the_first_error(name: str) -> None:
    """If a rank fails, no rank hangs: the others raise RankFailedError, with its error if it reported one."""
    failure = FAILURES[name]
    *others, failed = run_ranks(failure.world_size, train, failure, timeout_seconds=TIMEOUT_SECONDS)

    assert failed.error is not None
    assert ("exit code -9" if failure.is_killed else MESSAGE) in failed.error
    assert len(others) == failure.world_size - 1
    for other in others:
        assert other.error is not None
        assert "RankFailedError" in other.error
        assert (MESSAGE in other.error) != failure.is_killed
