"""A rank that fails in the middle of a step ends the others too, soon, with its own error."""

import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.errors import NonFiniteError
from anybatch.testing import Outcome, run_ranks
from tests.engine.cases import STRATEGIES, Batch, InMemory, classify, perceptron, vectors

TIMEOUT_SECONDS = 100.0
FAILING_STEP, FAILING_MICRO_BATCH = 1, 1


class Failure(NamedTuple):
    """How the last of some ranks fails, under which strategy; whether all had a failed step before and went on."""

    how: Literal["raises", "killed", "exits"]
    strategy: str
    world_size: int
    went_on: bool = False


FAILURES: Mapping[str, Failure] = {
    "raises, all_reduce": Failure("raises", "all_reduce", 3, went_on=True),
    "raises, ddp": Failure("raises", "ddp", 2),
    "killed, all_reduce": Failure("killed", "all_reduce", 2),
    "exits, ddp": Failure("exits", "ddp", 2),
}


def train(failure: Failure) -> int:
    """Run on every rank: train; the last rank fails in the second micro-batch of the second step."""
    world = ab.World.from_environment()
    micro_batches = 0

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal micro_batches
        fails = engine.num_steps == FAILING_STEP and world.rank == world.size - 1
        micro_batches = micro_batches + 1 if fails else 0
        if micro_batches > FAILING_MICRO_BATCH:
            if failure.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if failure.how == "exits":
                os._exit(7)
            message = "sample 17 is unreadable"
            raise RuntimeError(message)  # as torch does, also where a collective breaks
        return classify(model, batch)

    model = perceptron()
    engine = ab.Engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        ab.mean_over_samples(loss),
        micro_batch_size=2,
        strategy=STRATEGIES[failure.strategy](),
        world=world,
    )
    batch = vectors(6 * world.size)
    if failure.went_on:
        with pytest.raises(NonFiniteError):
            engine.step(InMemory({**batch, "x": batch["x"] * float("nan")}))
    for _ in range(3):
        engine.step(InMemory(batch))
    return engine.num_steps


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Return how every rank ended, for every failure; they are provoked side by side."""
    with ThreadPoolExecutor(len(FAILURES)) as executor:
        started = {
            name: executor.submit(run_ranks, failure.world_size, train, failure, timeout_seconds=TIMEOUT_SECONDS)
            for name, failure in FAILURES.items()
        }
        return {name: future.result() for name, future in started.items()}


@pytest.mark.parametrize("name", FAILURES)
def test_the_others_end_with_the_first_error(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    """No rank hangs: the others raise RankFailedError, which carries the failed rank's error if it left one."""
    *others, failed = outcomes[name]
    how, _, world_size, _ = FAILURES[name]
    words = {
        "raises": ("RuntimeError: sample 17 is unreadable",),
        "killed": ("exit code -9",),
        "exits": ("exit code 7",),
    }[how]

    assert failed.error is not None
    assert all(word in failed.error for word in words)
    assert len(others) == world_size - 1
    for other in others:
        assert other.error is not None
        assert "RankFailedError" in other.error
        expected = (
            f"rank {world_size - 1} failed in step {FAILING_STEP}: RuntimeError: sample 17 is unreadable"
            if how == "raises"
            else "another rank ended without a word"
        )
        assert expected in other.error
