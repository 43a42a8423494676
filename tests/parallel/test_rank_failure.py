"""Ranks learn about another rank's failure from structured values, not from error text."""

import os

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.errors import NonFiniteError, RankFailedError, WorldError
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.world import World
from anybatch.testing import RankPool
from tests.ranks_fixture import Ranks

STEP = 3
AWKWARD = 'rank 0 failed: "quoted", \n a line, \N{SNOWMAN}'


def published() -> tuple[RankFailure | None, WorldError]:
    """Run on every rank: rank 1 publishes a failure whose text looks like a message of rank 0."""
    world = World.from_environment(device="cpu")
    if world.rank == 1:
        world.publish_failure(NonFiniteError(AWKWARD), STEP)
    world.gather_numbers([0.0])  # until the failure is published
    assert world.roll_call is not None
    return world.published_failure(), world.roll_call.cause_of(RuntimeError("connection closed"))


def test_a_failure_is_published_as_a_value(two_ranks: Ranks) -> None:
    """Other ranks read rank, step, type and text of a failure, for any text; the failed rank reads nothing."""
    (seen, error), (own, _) = two_ranks.run(published)

    expected = RankFailure(rank=1, step=STEP, error_type="NonFiniteError", reason=AWKWARD)
    assert seen == expected
    assert own is None
    assert isinstance(error, RankFailedError)
    assert (error.rank, error.step, error.error_type, error.reason) == (1, STEP, "NonFiniteError", AWKWARD)
    assert str(error).startswith(
        f"rank 1 failed in step {STEP}: NonFiniteError: {AWKWARD}. Rank 0 waited for it, and stops too."
    )


def raised_together() -> tuple[str, int | None, str | None, str]:
    """Run on every rank: rank 1's function raises; return the error of this rank and its fields."""
    world = World.from_environment(device="cpu")

    def act() -> None:
        if world.rank == 1:
            raise ZeroDivisionError(AWKWARD)

    with pytest.raises((ZeroDivisionError, RankFailedError)) as caught:
        world.run_on_all_ranks(act)
    error = caught.value
    if isinstance(error, RankFailedError):
        return type(error).__name__, error.rank, error.error_type, error.reason
    return type(error).__name__, None, None, str(error)


def test_what_fails_together_carries_fields(two_ranks: Ranks) -> None:
    """A rank whose function succeeded gets the failed rank and its error as fields."""
    assert two_ranks.run(raised_together) == [
        ("RankFailedError", 1, "ZeroDivisionError", AWKWARD),
        ("ZeroDivisionError", None, None, AWKWARD),
    ]


def evaluate_or_die() -> int | None:
    """Run on three ranks: rank 1 dies; the others call evaluate, which begins with a rendezvous in the store."""
    with World.from_environment(device="cpu") as world:
        model = nn.Linear(3, 1)
        loss = ab.mean_over_samples(lambda model, batch: model(batch).square().mean())
        engine = ab.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, world=world)
        engine.step(torch.randn(2, 3, generator=torch.Generator().manual_seed(world.rank)))
        if world.rank == 1:
            os._exit(1)
        with pytest.raises(RankFailedError) as caught:
            engine.evaluate([torch.zeros(2, 3)])
        return caught.value.rank


@pytest.mark.slow
def test_a_meeting_with_a_rank_that_is_gone() -> None:
    """Ranks that wait for a rendezvous in the store learn within seconds which process has died."""
    with RankPool(3, timeout_seconds=600) as pool:
        assert [outcome.value for outcome in pool.outcomes(evaluate_or_die)[::2]] == [1, 1]
