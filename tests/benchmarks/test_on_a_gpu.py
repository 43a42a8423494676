"""`make gpu` on the CPU at the smallest size keeps its results after an interruption. CI runs every stage."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, str(ROOT / "benchmarks" / "on_a_gpu.py"), "--device", "cpu", "--size", "tiny")


def start(folder: Path, *stages: str) -> "subprocess.Popen[str]":
    """Start some stages as a user would, with their files in a folder."""
    # One thread, as tests run in parallel.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(  # noqa: S603 (our own program)
        [*COMMAND, "--stages", *stages, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.slow
@pytest.mark.published
def test_interrupted_stage_keeps_its_rows(tmp_path: Path) -> None:
    """After Ctrl-C the running stage has saved its rows, and its file says that later ones are missing."""
    process = start(tmp_path, "exactness", "memory")
    assert process.stdout is not None
    for line in process.stdout:
        if "micro-batches of 7" in line:
            break
    process.send_signal(signal.SIGINT)
    output = process.stdout.read()
    process.stdout.close()
    assert process.wait() == 130, output
    (path,) = tmp_path.iterdir()
    text = path.read_text(encoding="utf-8")
    assert path.name.startswith("gpu_exactness_")
    assert "later rows are missing" in text
    assert "| single, micro-batches of 7 |" in text
