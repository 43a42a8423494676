"""Warnings point at the user's line and are raised once."""

import inspect
import warnings

import anybatch as ab
from anybatch.engine.notifier import Notifier
from anybatch.errors import AnyBatchWarning
from tests.engine.cases import classify

HERE = __file__


def test_warning_points_at_the_users_line() -> None:
    """A warning points at the call in the user's file, not at a line of anybatch."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        frame = inspect.currentframe()
        assert frame is not None
        notifier(0).warn("code", "what and what to do")
        line = frame.f_lineno - 1

    assert [(one.filename, one.lineno, one.category) for one in seen] == [(HERE, line, AnyBatchWarning)]


def test_each_condition_warns_once_on_rank_0() -> None:
    """A condition that repeats in every step gives one warning, on rank 0 only."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rank in (0, 1):
            one = notifier(rank)
            for _ in range(3):
                one.warn("code", f"from rank {rank}")
            one.warn("other", f"another from rank {rank}")

    assert [str(one.message) for one in seen] == ["from rank 0", "another from rank 0"]


def notifier(rank: int) -> Notifier:
    """Return the notifier of a rank without an observer."""
    return Notifier(None, rank, ab.mean_over_samples(classify), None)
