"""The message of a failure, and its exit status."""

import errno
import re
import signal
from pathlib import Path

import pytest
import torch

from anybatch.cli.launch import number_of_ranks, warn_of_unused
from anybatch.cli.local_ranks import exit_status_of
from anybatch.cli.status import Status, explain, status_of
from anybatch.cli.train import TrainRequest
from anybatch.core.run_config import RunConfig
from anybatch.errors import (
    DataError,
    DiskFullError,
    DoesNotFitError,
    LossError,
    NonFiniteError,
    RankFailedError,
    TruncatedCheckpointError,
)
from anybatch.parallel.world import World
from anybatch.recipes.session import train
from tests.cli import small

KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DataError("x"), Status.USAGE),
        (LossError("x"), Status.USAGE),
        (NonFiniteError("x"), Status.NOT_FINITE),
        (TruncatedCheckpointError("x"), Status.FILES),
        (DiskFullError("x"), Status.FILES),
        (OSError(errno.ENOSPC, "No space left", "events.jsonl"), Status.FILES),
        (RankFailedError("x"), Status.RANKS),
        (DoesNotFitError("x"), Status.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("x"), Status.OUT_OF_MEMORY),
        (MemoryError("x"), Status.OUT_OF_MEMORY),
        (KeyboardInterrupt(), Status.INTERRUPTED),
    ],
)
def test_foreseen_errors(error: BaseException, status: Status) -> None:
    """Each kind of expected error has its own status, and prints a message without a traceback."""
    assert status_of(error) is status
    said = explain(raised(error), in_full=False)
    assert said.startswith("anybatch: ")
    assert "Traceback" not in said
    assert "Traceback" in explain(error, in_full=True)


def raised(error: BaseException) -> BaseException:
    """Return an error that has been raised, with its traceback."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_traceback_starts_in_the_users_file(tmp_path: Path) -> None:
    """The traceback of a user's error starts in the user's file, without anybatch's and torch's frames above."""
    with pytest.raises(small.FaultError) as caught:
        train(small.job(small.raise_fault), tmp_path / "run", world=World())
    error = caught.value
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next  # this test is a user's file too
    said = explain(error, in_full=False)

    assert said.startswith("anybatch: the recipe's own code failed:")
    assert re.search(r'small\.py", line \d+, in loss$', said.splitlines()[3])
    assert "session.py" not in said
    assert "engine.py" not in said
    *_, last, where, when = said.splitlines()
    assert last.endswith("FaultError: mine")
    assert "samples 0 to" in where
    assert "in step 0" in when


def test_our_bugs_print_the_whole_traceback() -> None:
    """An error without a user frame is a bug of ours: it prints the whole traceback and where to report it."""
    error = ValueError("deep inside")
    said = explain(error, in_full=False)
    assert "anybatch env" in said
    assert "ValueError: deep inside" in said


@pytest.mark.parametrize(
    ("statuses", "exit_codes", "status", "words"),
    [
        ([0, 0], {}, Status.DONE, ""),
        ([3, 3], {}, Status.STOPPED, ""),
        ([6, 4], {1: 4}, Status.NOT_FINITE, ""),
        ([6, 4], {0: 6}, Status.NOT_FINITE, ""),
        ([2, 2], {0: 2}, Status.USAGE, ""),
        ([6, -1], {1: KILLED}, Status.RANKS, "rank 1 was killed"),
        ([-1, -1], {0: -signal.SIGSEGV}, Status.RANKS, "rank 0 was ended by SIGSEGV"),
        ([-1, 6], {0: -99}, Status.RANKS, "rank 0 was ended by signal 99"),
        ([1, 4], {1: 4}, Status.NOT_FINITE, ""),
        ([-1, 6], {0: 9}, Status.RANKS, "rank 0 ended with exit code 9"),
        ([6, 6], {0: 6}, Status.RANKS, ""),
        ([0, -1], {}, Status.RANKS, ""),
    ],
)
def test_first_failure_counts(statuses: list[int], exit_codes: dict[int, int], status: Status, words: str) -> None:
    """The exit status of several ranks comes from the rank that failed first."""
    found, said = exit_status_of(statuses, exit_codes)
    assert found is status
    assert said.startswith(words)
    assert bool(said) == bool(words)


@pytest.mark.parametrize(
    ("num_accelerators", "num_ranks", "said"),
    [(0, 1, ""), (2, 2, ""), (4, 2, "uses 2 of 4 accelerators"), (2, 5, "5 ranks share 2")],
)
def test_unused_accelerators(
    num_accelerators: int,
    num_ranks: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With "auto", the launcher starts one rank per accelerator, or one without any; unused ones raise a warning."""
    monkeypatch.setattr("torch.accelerator.device_count", lambda: num_accelerators)
    monkeypatch.setattr("shutil.which", lambda _: None)
    request = TrainRequest(recipe=None, folder=None, resume=None, ranks="auto", config=RunConfig())
    assert number_of_ranks(request) == max(1, num_accelerators)
    warn_of_unused(num_ranks)
    printed = capsys.readouterr().err
    assert said in printed
    assert bool(printed) == bool(said)
