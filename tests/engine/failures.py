"""Ranks that fail in the middle of a run: how, where and under which strategy."""

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
from tests.engine.cases import STRATEGIES, Batch, InMemory, classify, cut, perceptron, vectors

FAILING_STEP, FAILING_MICRO_BATCH = 1, 1


class Failure(NamedTuple):
    """How and where the last rank fails, under which strategy, and whether all had a failed step before.

    "loader" is the user's loader, between steps; "feed" loads the micro-batches of an effective batch.
    """

    how: Literal["raises", "killed", "exits"]
    strategy: str
    world_size: int
    where: Literal["forward", "backward", "feed", "loader"] = "forward"
    went_on: bool = False


FAILURES: Mapping[str, Failure] = {
    "raises, all_reduce": Failure("raises", "all_reduce", 3, went_on=True),
    "raises, ddp": Failure("raises", "ddp", 2),
    "killed, all_reduce": Failure("killed", "all_reduce", 2),
    "exits, ddp": Failure("exits", "ddp", 2),
    "the backward raises, all_reduce": Failure("raises", "all_reduce", 2, "backward"),
    "the feed raises, ddp": Failure("raises", "ddp", 2, "feed"),
    "the loader raises, all_reduce": Failure("raises", "all_reduce", 2, "loader"),
}


def fail(how: str) -> None:
    """Kill or exit this process, or raise."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(7)
    message = "sample 17 is unreadable"
    raise RuntimeError(message)  # torch raises this type too, also if a collective breaks


class Broken(InMemory):
    """An effective batch whose second micro-batch cannot be loaded."""

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        for number, micro_batch in enumerate(super().feed(units, later_units)):
            if number == FAILING_MICRO_BATCH:
                fail("raises")
            yield micro_batch


class Doomed:
    """A rank's training; on the last rank it fails in the second step, in its second micro-batch if possible."""

    def __init__(self, failure: Failure, world: ab.World) -> None:
        self.failure = failure
        self.world = world
        self.micro_batches = 0
        model = perceptron()
        self.engine = ab.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            ab.mean_over_samples(self.loss),
            micro_batch_size=2,
            strategy=STRATEGIES[failure.strategy](),
            world=world,
        )

    def fails_now(self, where: str) -> bool:
        """Whether this rank fails in this place and step."""
        is_last = self.world.rank == self.world.size - 1
        return is_last and self.failure.where == where and self.engine.num_steps == FAILING_STEP

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean, or fail in the forward or the backward."""
        value = classify(model, batch)
        self.micro_batches = self.micro_batches + 1 if self.fails_now(self.failure.where) else 0
        if self.micro_batches > FAILING_MICRO_BATCH:
            if self.failure.where == "forward":
                fail(self.failure.how)
            value.register_hook(lambda _: fail(self.failure.how))
        return value

    def loader(self, own: Batch) -> Iterator[Batch]:
        """Yield three shares, or fail."""
        for _ in range(3):
            if self.fails_now("loader"):
                fail(self.failure.how)
            yield own


def train(failure: Failure) -> int:
    """Run on every rank: train until the last rank fails."""
    world = ab.World.from_environment()
    doomed, batch = Doomed(failure, world), vectors(6 * world.size)
    engine = doomed.engine
    if failure.went_on:
        with pytest.raises(NonFiniteError):
            engine.step(InMemory({**batch, "x": batch["x"] * float("nan")}))
    if failure.where == "loader":
        for share in ab.shares(doomed.loader(cut(batch, 6 * world.rank, 6 * world.rank + 6)), world=world):
            engine.step(share)
    for _ in range(3):
        engine.step(Broken(batch) if doomed.fails_now("feed") else InMemory(batch))
    return engine.num_steps
