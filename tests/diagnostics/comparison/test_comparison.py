"""Comparisons of ways to use devices: the ways that run, their measurements, and the report."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from anybatch.cli.compare import first_batches
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics.compare import ComparisonReport, compare
from anybatch.diagnostics.compared_ranks import variance_of
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


def test_the_variance_matches_its_formula() -> None:
    """The variance is `sum |g - m|^2 / (n - 1) / |m|^2` over all parameters; an unused parameter adds nothing."""
    values = [{"a": torch.tensor([1.0, 2.0]), "b": None}, {"a": torch.tensor([3.0, 2.0]), "b": None}]
    assert variance_of(values) == pytest.approx(2.0 / (4.0 + 4.0))
    assert variance_of(values[:1]) is None


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
    """On two real ranks every way runs, with the gradient of plain PyTorch on the full batch up to rounding.

    These have its variance too; the gradient of an eighth of the samples varies more from batch to batch.
    """
    assert not measured.unmeasured
    by_name = {one.way.name: one for one in measured.results}
    small, native = by_name.pop("small batch"), by_name["native"]
    assert small.gradient_error is None
    assert (small.gradient_variance or 0.0) > (native.gradient_variance or math.inf)
    for name, one in by_name.items():
        assert (math.inf if one.gradient_error is None else one.gradient_error) < 1e-5, name
        assert one.gradient_variance == native.gradient_variance
        assert one.seconds_per_step > 0
        assert one.total_peak_bytes >= one.peak_bytes > 0
    other = dataclasses.replace(by_name["accumulated"], gradient_error=0.1, gradient_variance=None)
    assert other.with_variance_of(native).gradient_variance is None


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
    values = json.loads(json.dumps(measured.as_json()))
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
