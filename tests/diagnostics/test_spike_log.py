"""Spikes found in a log are the ones that the run's own watch finds."""

import dataclasses
import math
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.records import DiagnosisRecord, StartRecord, StepRecord
from anybatch.core.spikes import SpikeRule, spikes_of
from anybatch.diagnostics.spike_log import read_spikes
from anybatch.errors import UserError
from anybatch.events.jsonl import JsonlLog

START = StartRecord(
    rank=0,
    world_size=1,
    first_step=0,
    geometry="",
    effective_batch_size=8,
    micro_batch_size=8,
    strategy="single",
    precision="fp32",
    device="cpu",
    dtype="float32",
    seed=0,
    num_parameters=1,
    gradient_bytes=4,
    versions={},
    decisions={},
)


def step_of(step: int, loss: float) -> StepRecord:
    """Return the record of a step."""
    return StepRecord(
        rank=0,
        step=step,
        epoch=0,
        sample_offset=8 * step,
        num_samples=8,
        num_micro_batches=1,
        loss=loss,
        losses={"loss": loss},
        counts={"loss": 8.0},
        gradient_norm=1.0 + 0.1 * (step % 3),
        clipped=None,
        learning_rates=(0.1,),
        skipped=False,
    )


def loss_at(step: int) -> float:
    """Return a falling loss that jumps in step 60."""
    return (2.0 + 0.2 * (step % 5)) / math.sqrt(1 + step / 20) * (50.0 if step == 60 else 1.0)


def test_a_log_has_the_spikes_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spikes are found without steps that a resume discarded, and printed with the run's own messages."""
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.observe(START)
        for step in range(90):
            # A first segment that went wrong later, and that a resume discarded.
            log.observe(step_of(step, loss_at(step) if step < 70 else float("nan")))
        log.observe(dataclasses.replace(START, first_step=65))
        for step in range(65, 80):
            log.observe(step_of(step, loss_at(step)))
        log.observe(DiagnosisRecord(rank=0, step=60, code="spike", level="warning", message="it jumped", remedy=None))
    report = read_spikes(tmp_path)
    plain = [(step, loss_at(step), 1.0 + 0.1 * (step % 3)) for step in range(80)]
    assert list(report.spikes) == spikes_of(plain, SpikeRule())
    assert [spike.step for spike in report.spikes] == [60]
    assert report.num_steps == 80
    assert main(["spikes", str(tmp_path)]) == Status.DONE
    printed = capsys.readouterr().out
    assert "80 steps, 1 spike\n  step 60: the loss jumped from" in printed
    assert "messages of the run's own watch:\n  step 60: it jumped" in printed


def test_a_short_log_is_refused(tmp_path: Path) -> None:
    """A log with too few steps to estimate the level raises with both numbers."""
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.observe(START)
        for step in range(5):
            log.observe(step_of(step, 1.0))
    with pytest.raises(UserError, match="holds 5 steps, and level and scatter are known after 24"):
        read_spikes(tmp_path / "events.jsonl")
