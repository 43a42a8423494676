"""Pools of ranks and how they end."""

import multiprocessing
import os
import sys
import warnings

import pytest

from anybatch.testing import RankPool, run_ranks


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_forked_ranks_end_by_themselves() -> None:
    """All ranks of a closed pool exit with status 0, without being killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads, such as other tests'
        pool = RankPool(3, timeout_seconds=60.0, context=multiprocessing.get_context("fork"))
    with pool:
        pids = pool.run(os.getpid)
        ranks = [child for child in multiprocessing.active_children() if child.pid in pids]

    assert len(ranks) == 3
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]


def what_cannot_be_pickled() -> object:
    """Run on every rank."""
    return lambda: None


@pytest.mark.slow
def test_a_value_that_cannot_be_pickled() -> None:
    """A value that cannot be pickled returns pickle's error, not just the exit code of the rank."""
    (outcome,) = run_ranks(1, what_cannot_be_pickled)

    assert outcome.error is not None
    assert "what_cannot_be_pickled.<locals>.<lambda>" in outcome.error
