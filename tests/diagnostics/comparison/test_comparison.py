"""Comparisons of ways to use devices: the ways that run, their measurements, and the report."""

import dataclasses
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.cli.command import plain
from anybatch.cli.compare import first_batches
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics.compare import ComparisonReport, SetupResult, compare, queued_share, setup_result
from anybatch.diagnostics.compared_ranks import RankFigures
from anybatch.diagnostics.compared_setups import TrainingSetup, training_setups
from anybatch.diagnostics.figures import draw_comparison
from anybatch.errors import BatchSizeError, UserError
from anybatch.recipes.load import MeasuredJob
from tests.cli.small import SPEC
from tests.raising import raises


def ways(effective: int = 16, micro: int = 2, devices: int = 2) -> dict[str, TrainingSetup]:
    """Return the ways by name."""
    found = training_setups(effective_batch_size=effective, micro_batch_size=micro, num_devices=devices)
    return {way.name: way for way in found}


def test_a_batch_is_ranks_times_steps_times_micro_batch() -> None:
    """Every way except the small batch covers the effective batch: ranks x micro-batches x their size."""
    for name, way in ways().items():
        assert way.num_samples == (2 if name == "small batch" else 16)
        assert way.num_samples % (way.num_ranks * way.micro_batch_size) == 0


def test_ways_that_cannot_run_have_a_reason() -> None:
    """One device runs no multi-device way, and a share of one micro-batch cannot accumulate; each has its reason.

    A micro-batch above the batch, none, and fewer samples than devices are refused.
    """
    alone = ways(devices=1)
    assert {name for name, way in alone.items() if not way.unmeasured} == {"small batch", "native", "accumulated"}
    assert "several devices" in alone["DDP"].unmeasured
    whole = ways(effective=4, micro=2)
    assert "the 2 samples of a rank are one micro-batch" in whole["DDP accumulated"].unmeasured
    assert not whole["accumulated"].unmeasured
    for sizes, code in (
        ((4, 5, 1), "size_out_of_range"),
        ((4, 0, 1), "size_out_of_range"),
        ((2, 1, 3), "too_few_samples"),
    ):
        with raises(BatchSizeError, code):
            ways(*sizes)


@pytest.fixture(scope="module")
def measured() -> ComparisonReport:
    """Return the comparison of a small job, in all ways, on two ranks."""
    job = MeasuredJob(recipe=SPEC, config=RunConfig(effective_batch_size=16))
    return compare(
        job.train_spec,
        partial(first_batches, job),
        effective_batch_size=16,
        micro_batch_size=2,
        num_rounds=1,
    )


@pytest.mark.ranks
def test_all_ways_have_the_gradient_of_the_unsplit_batch(measured: ComparisonReport) -> None:
    """On two real ranks every way runs, with the gradient of plain PyTorch on the full batch up to rounding."""
    assert not measured.unmeasured
    by_name = {one.way.name: one for one in measured.results}
    assert by_name.pop("small batch").gradient_error is None
    for name, one in by_name.items():
        assert (math.inf if one.gradient_error is None else one.gradient_error) < 1e-5, name
        assert one.seconds_per_step > 0
        assert one.total_peak_bytes >= one.peak_bytes > 0


@pytest.mark.ranks
def test_reduced_bytes_match_the_gradient(measured: ComparisonReport) -> None:
    """Each rank reduces one gradient per step, regardless of micro-batches; without no_sync, one per micro-batch."""
    model = MeasuredJob(recipe=SPEC).train_spec().model
    assert isinstance(model, torch.nn.Module)
    gradient = sum(p.numel() * p.itemsize for p in model.parameters())
    sent = {one.way.name: one.gradient_bytes for one in measured.results}
    assert sent.pop("DDP without no_sync") == 4 * gradient
    alone = {"small batch", "native", "accumulated", "DataParallel"}
    assert {name: sent.pop(name) for name in alone} == dict.fromkeys(alone, 0)
    fsdp = sent.pop("FSDP accumulated")  # shards are padded to equal size
    assert gradient <= fsdp <= gradient + 64 * 2
    assert set(sent.values()) == {gradient}


@pytest.mark.ranks
def test_report_as_picture_text_and_json(measured: ComparisonReport, tmp_path: Path) -> None:
    """Picture and text show every way and what follows, and the values can be written as JSON."""
    assert "no_sync until the last micro-batch" in str(measured)
    draw_comparison(measured, tmp_path / "ways.svg")
    drawn = (tmp_path / "ways.svg").read_text(encoding="utf-8")
    assert all(one.way.name in drawn for one in measured.results)
    values = json.loads(json.dumps(plain(measured), allow_nan=False))
    assert math.isclose(values["results"][1]["seconds_per_sample"], values["results"][1]["seconds_per_step"] / 16)


@pytest.mark.ranks
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One device runs three ways, lists the others with reasons, and writes the figures to the file."""
    file = tmp_path / "ways.json"
    words = f"compare {SPEC} --effective-batch-size 8 --micro-batch-size 1 --devices 1 --seconds 0.1 --json {file}"
    assert main(words.split()) == Status.DONE
    printed = capsys.readouterr().out
    assert "accumulated, relative to native (unsplit)" in printed
    assert "DDP: it needs several devices, but only one is used" in printed
    assert len(json.loads(file.read_text(encoding="utf-8"))["results"]) == 3


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer GPUs than requested, more devices than samples, and no time are errors, before any rank starts."""
    job = MeasuredJob(recipe=SPEC, config=RunConfig(effective_batch_size=64))
    with raises(UserError, "too_few_devices"):
        compare(
            job.train_spec, partial(first_batches, job), effective_batch_size=64, num_devices=64, device_type="cuda"
        )
    for words, said in (("2 --devices 3", "3 devices"), ("8 --seconds -1", "max_seconds=-1.0 must be a finite")):
        assert main(["compare", SPEC, "--effective-batch-size", *words.split()]) == Status.USAGE
        assert said in capsys.readouterr().err


def result(name: str, seconds: Sequence[float], **changed: Any) -> SetupResult:
    """Return the result of a setup with these seconds of a step in each round."""
    figures = RankFigures(
        step_seconds=[[each] for each in seconds], unreduced_seconds=[[0.1]] * len(seconds), peak_bytes=1
    )
    return dataclasses.replace(setup_result(ways()[name], [figures]), **changed)


def report(*results: SetupResult, queued_share: float = 0.0) -> ComparisonReport:
    """Return the report of these results."""
    sizes = {"effective_batch_size": 16, "micro_batch_size": 2, "queued_share": queued_share}
    return ComparisonReport(title="", device="", results=results, unmeasured={}, **sizes)  # type: ignore[arg-type]


def test_differences_within_the_noise_are_not_reported() -> None:
    """The fastest setup is named if it is faster in the rounds; equal ones are named together; noise names none."""
    quick, slow = (result(name, [each] * 6) for name, each in (("native", 1.0), ("accumulated", 1.5)))
    equal = result("DDP", [1.1, 0.9] * 3)
    assert report(quick, slow).fastest == (quick,)
    assert set(report(quick, equal, slow).fastest) == {quick, equal}
    assert report(quick, equal).fastest == ()
    assert report(quick, slow, queued_share=0.3).fastest == ()
    few = [result(name, [each]) for name, each in (("native", 1.0), ("accumulated", 1.5))]
    assert report(*few).fastest == ()
    assert str(report(quick, slow)) != str(report(quick, slow, queued_share=0.3))


def test_ranks_that_wait_for_a_core_show_a_busy_machine() -> None:
    """Other programs count if they slow down one rank, or all ranks; not if there are more ranks than cores."""
    setups = [ways()["native"], ways()["DDP"]]
    ranks = [
        {
            name: RankFigures(all_seconds=1.0, queued_seconds=queued)
            for name, queued in (("native", 0.02), ("DDP", more))
        }
        for more in (0.3, 0.1)
    ]
    assert queued_share(setups, ranks, num_cores=2) == pytest.approx(0.2)
    assert queued_share(setups, ranks, num_cores=1) == pytest.approx(0.02)


def test_rounds_are_compared_on_a_machine_that_changes_its_speed() -> None:
    """A ratio is taken within each round, and a setup that is faster only in its quick rounds is not the fastest."""
    speeds = (1.0, 3.0, 1.0, 3.0, 3.0, 1.0, 1.0, 3.0)
    quick, slow = (result(name, [each * speed for speed in speeds]) for name, each in (("native", 1), ("DDP", 1.2)))
    assert slow.time_relative_to(quick).low == pytest.approx(1.2)
    assert report(quick, slow).fastest == (quick,)


def test_exposed_communication_is_not_negative() -> None:
    """Communication that may be 0 has an upper limit instead of a share, and a share is never below 0."""
    shorter = result("DDP", [0.05, 0.15] * 4)
    assert (shorter.exposed_share, shorter.exposed_text) == (0.0, "<50%")
    assert result("DDP", [0.2] * 8).exposed_text == "50%"
