"""A steady step does not run more files, calls or idle calls than recorded."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_path.py"
MAX_COUNTS = {1: (18, 81, 7), 2: (24, 137, 13)}
"""Number of ranks -> maximum files, calls and idle calls, slightly above the current (18, 80, 6 and 24, 131, 11)."""
NUM_TRIES = 3
"""A rank that waits long for another, on a busy machine, makes a few more calls."""


def counts_of(num_ranks: int) -> tuple[tuple[int, ...], str]:
    """Return files, calls and idle calls of a steady step, and the list of them."""
    done = subprocess.run(  # noqa: S603 (our own program)
        [sys.executable, str(SCRIPT), "--ranks", str(num_ranks), "--list"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    counts = re.match(r"(\d+) files, (\d+) calls, (\d+) idle calls", done.stdout)
    assert counts is not None, done.stdout
    return tuple(map(int, counts.groups())), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", MAX_COUNTS)
def test_steady_step_runs_no_more_code_than_recorded(num_ranks: int) -> None:
    """A steady step with one micro-batch and no observer stays within the recorded counts."""
    listed = ""
    for _ in range(NUM_TRIES):
        found, listed = counts_of(num_ranks)
        if all(number <= most for number, most in zip(found, MAX_COUNTS[num_ranks], strict=True)):
            return
    pytest.fail(f"more files, calls or idle calls than {MAX_COUNTS[num_ranks]}:\n{listed}")
