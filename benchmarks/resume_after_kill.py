"""A run killed at random moments and resumed ends like an uninterrupted one: the recipe `digits`, 1 and 2 ranks.

At each of ten random steps of a run of five epochs, all its processes get SIGKILL together, as in a power failure, at
a random moment within the step. It resumes with the printed command, on the same number of ranks. Its parameters are
compared with the uninterrupted run, bit for bit; each of its steps must be in its log, at the same position in the
data as in the other run.

    python benchmarks/resume_after_kill.py [--out benchmarks/results/NAME.md]
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import report
import torch

from anybatch.checkpoints import load_latest
from anybatch.events.jsonl import read_jsonl

NUM_KILLS = 10
NUM_EPOCHS = 5
NUM_STEPS = 30
STEP_SECONDS = 0.03
FIXED = ("--micro-batch-size", "64")
"""Without it, each run tries sizes, and the fastest one may differ on a busy machine, and with it the rounding."""
Run = dict[int, tuple[int, int]]


def start(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    """Start `anybatch train` in its own session, so that all of its processes can be killed together."""
    return subprocess.Popen(
        [sys.executable, "-m", "anybatch", "train", "--out", str(folder), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_in_step(process: "subprocess.Popen[bytes]", folder: Path, step: int, seconds: float) -> None:
    """Wait until the log has a step, then for this many seconds, then kill every process of the run."""
    log = folder / "events.jsonl"
    needle = f'"kind":"step","rank":0,"step":{step},'
    while not log.exists() or needle not in log.read_text():
        if process.poll() is not None:
            message = f"the run ended with status {process.returncode} before step {step}"
            raise RuntimeError(message)
        time.sleep(0.002)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def positions(folder: Path) -> Run:
    """Return step -> (epoch, samples of it) after that step, by the last record of each step."""
    return {
        line["step"]: (line["epoch"], line["sample_offset"])
        for line in read_jsonl(folder / "events.jsonl")
        if line["kind"] == "step"
    }


def same(one: Path, other: Path) -> bool:
    """Return whether the parameters and the optimizer of two runs are bitwise equal."""
    first, second = (load_latest(folder / "checkpoints").state for folder in (one, other))
    moments, others = first["optimizer"]["state"], second["optimizer"]["state"]
    return all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"]) and all(
        torch.equal(value, others[key][name]) for key, values in moments.items() for name, value in values.items()
    )


def rows(root: Path) -> list[str]:
    """Run everything and return the table's rows."""
    table = ["| ranks | killed after step | resumed at step | same bits | each step once |", "|--:|--:|--:|---|---|"]
    draw = random.Random(0)  # noqa: S311 (nothing here is secret)
    for ranks in ("1", "2"):
        through = root / f"through-{ranks}"
        start(through, "digits", *FIXED, "--epochs", str(NUM_EPOCHS), "--ranks", ranks).wait()
        for number in range(NUM_KILLS):
            folder = root / f"killed-{ranks}-{number}"
            step = draw.randrange(NUM_STEPS - 1)
            process = start(folder, "digits", *FIXED, "--epochs", str(NUM_EPOCHS), "--ranks", ranks)
            kill_in_step(process, folder, step, draw.uniform(0, STEP_SECONDS))
            status = start(folder, "--resume").wait()
            starts = [line["first_step"] for line in read_jsonl(folder / "events.jsonl") if line["kind"] == "start"]
            bits = "yes" if status == 0 and same(folder, through) else "NO"
            steps = "yes" if positions(folder) == positions(through) else "NO"
            table.append(f"| {ranks} | {step} | {starts[-1]} | {bits} | {steps} |")
    return table


def main() -> None:
    """Print the table, and write it to a file if asked."""
    out = report.parser(__doc__).parse_args().out
    with tempfile.TemporaryDirectory() as root:
        report.publish(
            rows(Path(root)),
            title="Resumed after SIGKILL at random moments",
            command="python benchmarks/resume_after_kill.py",
            setting=f"{NUM_KILLS} kills each, steps counted from 0, float32",
            out=out,
        )


if __name__ == "__main__":
    main()
