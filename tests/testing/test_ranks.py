"""Pools of ranks: how they end."""

import multiprocessing
import os
import sys
import warnings

import pytest

from anybatch.testing import RankPool, run_ranks
from tests.faults import sees


@sees(
    "forked ranks keep the pool's ends of their pipes",
    "src/anybatch/testing/ranks.py",
    'if context.get_start_method() == "fork" else ()',
    'if context.get_start_method() == "spawn" else ()',
)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
def test_forked_ranks_end_by_themselves() -> None:
    """A pool that is closed is heard by all of its ranks: they end with status 0, and none has to be killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads, such as other tests'
        pool = RankPool(3, timeout_seconds=60.0, context=multiprocessing.get_context("fork"))
    with pool:
        pids = pool.run(os.getpid)
        ranks = [child for child in multiprocessing.active_children() if child.pid in pids]

    assert len(ranks) == 3
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]


def what_cannot_be_pickled() -> object:
    """Run on every rank."""
    return lambda: None


@sees(
    "a rank dies of a value that cannot be pickled",
    "src/anybatch/testing/ranks.py",
    "        except (Exception, SystemExit):  # noqa: BLE001 (the caller gets it as text)",
    "        except ZeroDivisionError:",
)
@pytest.mark.slow
def test_a_value_that_cannot_be_pickled() -> None:
    """The outcome is pickle's own error, and not only the exit code of a rank that died."""
    (outcome,) = run_ranks(1, what_cannot_be_pickled)

    assert outcome.error is not None
    assert "what_cannot_be_pickled.<locals>.<lambda>" in outcome.error
