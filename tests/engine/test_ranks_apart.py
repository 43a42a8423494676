"""Ranks agree in every step: an error or difference of one rank raises on all, soon and before the update."""

from functools import partial
from pathlib import Path

import pytest
import torch

from anybatch.testing import run_ranks
from tests.engine.ranks_apart import (
    APART,
    MESSAGE,
    NUM_BATCHES,
    Told,
    called_by_one,
    changes_weight,
    ends_in_shares,
    evaluates_more,
    fails_in_update,
    plain_loop,
    raises_on_all,
    saves_alone_in_shares,
    saves_without_the_others,
    sets_rate,
    skips,
)
from tests.faults import sees
from tests.ranks_fixture import Ranks

TIMEOUT_SECONDS = 40.0  # for ranks that are not reused; the expected errors come within seconds
STRATEGIES = ["all_reduce", "ddp"]
GOES_ON = [number for number in range(NUM_BATCHES) if number != APART]
ENDS = ["0", "1", "2", "3"]


def ends_with(apart: str) -> list[str]:
    """Return the outcomes of a run in which the step at `APART` was not made."""
    return [*ENDS[:APART], apart, *ENDS[APART:]]


def assert_trained(told: Told, numbers: list[int]) -> None:
    """Assert that the weights equal a plain loop's over some batches."""
    expected = torch.tensor(plain_loop(numbers), dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(told.weights, dtype=torch.float64), expected, rtol=1e-12, atol=1e-14)


def test_a_batch_that_one_rank_skips(two_ranks: Ranks) -> None:
    """A batch skipped by one rank is refused on all; the weights do not change."""
    for told in two_ranks.run(skips, "all_reduce"):
        assert told.kinds == ["0", "1", "RanksDifferError"]
        assert told.fields["names"] == ("batch",)
        assert told.fields["step"] == APART
        assert_trained(told, [0, 1])


def test_another_learning_rate_on_one_rank(two_ranks: Ranks) -> None:
    """A different learning rate on one rank is refused on all, with both values; other steps are made."""
    for told in two_ranks.run(sets_rate, "all_reduce"):
        assert told.kinds == ends_with("RanksDifferError")
        assert told.fields["names"] == ("settings", "lr of group 0")
        assert_trained(told, GOES_ON)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_that_one_rank_changes(strategy: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """A weight changed on one rank is refused by save and evaluate, by name."""
    for told in two_ranks.run(changes_weight, strategy, str(tmp_path)):
        assert told.kinds == ["0", "ReplicaError", "ReplicaError"]
        assert (told.fields["ranks"], told.fields["names"]) == ((1,), ("0.weight",))


@sees(
    "an engine continues after a failed update",
    "src/anybatch/engine/updater.py",
    """
        except BaseException as error:
            self.interrupted_by = _first_line(error)
""",
    """
        except BaseException as error:
""",
)
@pytest.mark.ranks
def test_an_update_that_fails_on_one_rank() -> None:
    """The rank with a failed update refuses to continue, and the others raise in their next step instead of waiting."""
    other, failed = (outcome.value for outcome in run_ranks(2, fails_in_update, "ddp", timeout_seconds=TIMEOUT_SECONDS))
    assert failed.kinds == ["0", "1", "RuntimeError", "UpdateFailedError"]
    assert "the update of step 2 (counted from 0) failed midway (RuntimeError: planted)" in failed.ends[-1]
    assert other.kinds == ["0", "1", "2", "RankFailedError"]
    assert "rank 1 failed in step 2: RuntimeError: planted" in other.ends[-1]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "strategy", "name"),
    [(2, "ddp", "evaluate"), (3, "all_reduce", "save")],
)
def test_a_rank_that_makes_another_call(world_size: int, strategy: str, name: str, tmp_path: Path) -> None:
    """If ranks make different calls, all raise soon, with the call of each, instead of reaching the time-out."""
    outcomes = run_ranks(world_size, called_by_one, strategy, name, str(tmp_path), timeout_seconds=TIMEOUT_SECONDS)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert outcome.value.kinds[:2] == ["0", "RanksDifferError"]
        said = outcome.value.ends[1]
        assert f"rank 0 called engine.{name} at step 1" in said
        assert f"rank {world_size - 1} called engine.step at step 1" in said


def test_one_extra_batch_to_evaluate(two_ranks: Ranks) -> None:
    """An extra batch in one rank's evaluation is refused on all, with the fix; later calls run normally."""
    for told in two_ranks.run(evaluates_more, "all_reduce"):
        assert told.kinds == ["DataError", "done", "0"]
        assert_trained(told, [0])


@pytest.mark.ranks
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_ends_in_its_loader(is_killed: bool) -> None:
    """If a rank raises or is killed in its loader, the others raise RankFailedError, with its error if it had one."""
    *others, failed = run_ranks(3, partial(ends_in_shares, is_killed=is_killed), "ddp", timeout_seconds=100.0)
    assert failed.error is not None
    assert ("exit code -9" if is_killed else MESSAGE) in failed.error
    for other in others:
        assert other.error is not None
        assert "RankFailedError" in other.error
        assert (MESSAGE in other.error) != is_killed


@pytest.mark.ranks
def test_a_rank_that_calls_nothing(tmp_path: Path) -> None:
    """A rank that waits for another one without a call raises after the timeout, and names rank, call and step."""
    outcomes = run_ranks(2, saves_without_the_others, str(tmp_path), timeout_seconds=TIMEOUT_SECONDS)
    waited, silent = (outcome.value for outcome in outcomes)
    assert waited is not None, outcomes[0].error
    assert waited.startswith("WorldError: rank 1 has not called engine.save at step 0 within 1 seconds")
    assert silent == ""


@pytest.mark.ranks
def test_a_save_on_one_rank_within_shares(tmp_path: Path) -> None:
    """A save on one rank within `ab.shares` raises on both, although the loader has a separate world."""
    for outcome in run_ranks(2, saves_alone_in_shares, "all_reduce", str(tmp_path), timeout_seconds=TIMEOUT_SECONDS):
        assert outcome.value is not None, outcome.error
        said = next(end for end in outcome.value.ends if end.startswith("RanksDifferError"))
        assert "rank 0 called engine.save at step 1; rank 1 called ab.shares for share 1" in said
        assert "remove `if rank == 0`" in said


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "where", "end"),
    [("all_reduce", "loss", "1"), ("ddp", "loss", "1"), ("all_reduce", "after the backward", "WorldError")],
)
def test_an_error_on_all_ranks(strategy: str, where: str, end: str) -> None:
    """After an error on all ranks they continue, or are refused if sums of the failed step are pending."""
    for outcome in run_ranks(2, raises_on_all, strategy, where, timeout_seconds=TIMEOUT_SECONDS):
        assert outcome.value is not None, outcome.error
        assert outcome.value.kinds == ["0", "ValueError", end]
