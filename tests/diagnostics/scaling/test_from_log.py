"""A finished log gives the parts of its steps, from one rank's file or from all."""

from pathlib import Path

import pytest

from anybatch.core.records import PhaseName, PhaseRecord, ReductionRecord
from anybatch.diagnostics.step_times import read_steps
from anybatch.errors import UserError
from anybatch.events.jsonl import JsonlLog
from tests.events.recorded_run import micro_batch, step
from tests.raising import raises

NUM_STEPS = 4


class Writer:
    """Writes the log of a rank with a fake clock."""

    def __init__(self, path: Path, rank: int) -> None:
        self.now = 0.0
        self.rank = rank
        self.log = JsonlLog(path, clock=lambda: self.now)

    def phase(self, step: int, name: PhaseName, seconds: float) -> None:
        """Write a phase of this length."""
        for event in ("begin", "end"):
            self.log.observe(PhaseRecord(rank=self.rank, event=event, step=step, name=name, position=None))
            self.now += seconds if event == "begin" else 0.0

    def step(self, number: int, *, load: float, compute: float, reduce: float) -> None:
        """Write a step."""
        self.phase(number, "load", load)
        self.log.observe(micro_batch(number, 0, "begin", rank=self.rank))
        self.now += compute
        self.log.observe(micro_batch(number, 0, "end", rank=self.rank))
        for bucket in range(5):
            self.log.observe(
                ReductionRecord(
                    rank=self.rank,
                    event="begin",
                    step=number,
                    bucket=bucket,
                    collective="all_reduce",
                    payload="gradients",
                    num_bytes=1000,
                    dtype="float32",
                )
            )
        self.phase(number, "reduce", reduce)
        self.phase(number, "update", 0.001)
        self.log.observe(step(number, rank=self.rank))


def write(folder: Path, rank: int, **parts: float) -> Path:
    """Write the log of a rank, with a first step ten times as long as the others."""
    path = folder / ("events.jsonl" if rank == 0 else f"events-rank-{rank}.jsonl")
    writer = Writer(path, rank)
    with writer.log:
        for number in range(NUM_STEPS):
            writer.step(number, **{name: value * (10 if number == 0 else 1) for name, value in parts.items()})
    return path


def test_a_straggler_in_two_logs(tmp_path: Path) -> None:
    """The last rank waits only for the sum; the extra time of the others is waiting for that rank."""
    write(tmp_path, 0, load=0.01, compute=0.1, reduce=0.085)
    write(tmp_path, 1, load=0.01, compute=0.18, reduce=0.005)
    found = read_steps(tmp_path)

    assert (found.num_logs, found.num_steps) == (2, NUM_STEPS - 1)
    assert found.step == pytest.approx(0.196)
    assert found.waiting == pytest.approx(0.01)
    assert found.compute == pytest.approx(0.14)
    assert found.communication == pytest.approx(0.005)
    assert found.stragglers == pytest.approx(0.04)
    assert found.bottleneck == "stragglers"


def test_one_log(tmp_path: Path) -> None:
    """With one log, waiting for other ranks counts as communication; small messages are reported."""
    found = read_steps(write(tmp_path, 0, load=0.01, compute=0.1, reduce=0.085))

    assert found.stragglers is None
    assert found.communication == pytest.approx(0.085)
    assert "5 messages of" in str(found)
    assert "larger buckets" in str(found)


def test_loading_and_health(tmp_path: Path) -> None:
    """Waiting for data is the bottleneck from a tenth of a step on; a healthy run has none."""
    (tmp_path / "slow").mkdir()
    assert read_steps(write(tmp_path / "slow", 0, load=0.05, compute=0.1, reduce=0.0)).bottleneck == "waiting for data"
    assert "no bottleneck" in str(read_steps(write(tmp_path, 0, load=0.001, compute=0.1, reduce=0.001)))


def test_a_log_without_steps(tmp_path: Path) -> None:
    """A log with fewer than two complete steps raises."""
    (tmp_path / "events.jsonl").touch()
    with raises(UserError, "too_few_steps"):
        read_steps(tmp_path)
