"""When one rank fails, the others end soon after, with its error."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from anybatch.testing import RankOutcome, run_ranks
from tests.engine.failures import FAILING_STEP, FAILURES, train
from tests.ranks_fixture import selected

pytestmark = pytest.mark.ranks

TIMEOUT_SECONDS = 100.0
AT_ONCE = 3  # so that not all ranks start at the same time


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[RankOutcome]]:
    """Return how each rank ended in each failure; several failures run in parallel."""
    with ThreadPoolExecutor(AT_ONCE) as executor:
        started = {
            name: executor.submit(run_ranks, failure.world_size, train, failure, timeout_seconds=TIMEOUT_SECONDS)
            for name, failure in FAILURES.items()
            if name in selected(request, "name")
        }
        return {name: future.result() for name, future in started.items()}


@pytest.mark.parametrize("name", FAILURES)
def test_the_others_end_with_the_first_error(name: str, outcomes: dict[str, list[RankOutcome]]) -> None:
    """If a rank fails, no rank hangs: the others raise RankFailedError, with its error if it reported one."""
    *others, failed = outcomes[name]
    failure = FAILURES[name]
    words = {
        "raises": "RuntimeError: sample 17 is unreadable",
        "killed": "exit code -9",
        "exits": "exit code 7",
    }[failure.how]
    place = "between steps" if failure.where == "loader" else f"in step {FAILING_STEP}"

    assert failed.error is not None
    assert words in failed.error
    assert len(others) == failure.world_size - 1
    for other in others:
        assert other.error is not None
        assert "RankFailedError" in other.error
        expected = (
            f"rank {failure.world_size - 1} failed {place}: RuntimeError: sample 17 is unreadable"
            if failure.how == "raises"
            else "loaders of different lengths: wrap them in ab.shares"
        )
        assert expected in other.error
