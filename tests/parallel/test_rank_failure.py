"""Ranks learn about another rank's failure from structured values, not from error text."""

import pytest

from anybatch.errors import NonFiniteError, RankFailedError, WorldError
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.world import World
from tests.ranks_fixture import Ranks

STEP = 3
AWKWARD = 'rank 0 failed: "quoted", \n a line, \N{SNOWMAN}'


def published() -> tuple[RankFailure | None, WorldError]:
    """Run on every rank: rank 1 publishes a failure whose text looks like a message of rank 0."""
    world = World.from_environment(device="cpu")
    if world.rank == 1:
        world.publish_failure(NonFiniteError(AWKWARD), STEP)
    world.gather_numbers([0.0])  # until the failure is published
    assert world.call_tracker is not None
    return world.published_failure(), world.call_tracker.cause_of(RuntimeError("connection closed"))


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


def test_shared_failures_have_fields(two_ranks: Ranks) -> None:
    """A rank whose function succeeded gets the failed rank and its error as fields."""
    assert two_ranks.run(raised_together) == [
        ("RankFailedError", 1, "ZeroDivisionError", AWKWARD),
        ("ZeroDivisionError", None, None, AWKWARD),
    ]
