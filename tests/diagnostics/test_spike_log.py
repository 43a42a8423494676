"""Spikes found in a log are the ones that the run's own watch finds."""

import math
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.records import StepRecord
from anybatch.core.spikes import SpikeRule, spikes_of
from anybatch.diagnostics.spike_log import read_spikes
from anybatch.events.jsonl import JsonlLog
from tests.events.recorded_run import start, step


def step_of(number: int, loss: float) -> StepRecord:
    """Return the record of a step."""
    return step(number, loss, gradient_norm=1.0 + 0.1 * (number % 3))


def loss_at(step: int) -> float:
    """Return a falling loss that jumps in step 60."""
    return (2.0 + 0.2 * (step % 5)) / math.sqrt(1 + step / 20) * (50.0 if step == 60 else 1.0)


def test_a_log_has_the_spikes_of_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spikes are found without steps that a resume discarded."""
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.observe(start())
        for number in range(90):
            # A first segment that went wrong later, and that a resume discarded.
            log.observe(step_of(number, loss_at(number) if number < 70 else float("nan")))
        log.observe(start(65))
        for number in range(65, 80):
            log.observe(step_of(number, loss_at(number)))
    report = read_spikes(tmp_path)
    plain = [(number, loss_at(number), 1.0 + 0.1 * (number % 3)) for number in range(80)]
    assert list(report.spikes) == spikes_of(plain, SpikeRule())
    assert [spike.step for spike in report.spikes] == [60]
    assert report.num_steps == 80
    assert main(["spikes", str(tmp_path)]) == Status.DONE
    printed = capsys.readouterr().out
    assert "80 steps, 1 spike\n  step 60: the loss jumped from" in printed


def test_a_short_log(tmp_path: Path) -> None:
    """A log of a few steps has no spikes, but a loss that is not finite."""
    with JsonlLog(tmp_path / "events.jsonl") as log:
        log.observe(start())
        for number in range(5):
            log.observe(step_of(number, float("nan") if number == 4 else 1.0))
    report = read_spikes(tmp_path / "events.jsonl")
    assert report.num_steps == 5
    assert [(spike.step, spike.form) for spike in report.spikes] == [(4, "not finite")]
