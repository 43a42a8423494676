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
from anybatch.core.collectives import Link
from anybatch.core.run_config import RunConfig
from anybatch.diagnostics.compare import ComparisonReport, WayResult, compare
from anybatch.diagnostics.compared_ranks import variance_of
from anybatch.diagnostics.compared_ways import Way, ways_of
from anybatch.diagnostics.figures import draw_comparison
from anybatch.errors import BatchSizeError, UserError
from anybatch.planner.forecast import largest_worlds
from anybatch.planner.forecast_report import Cluster
from anybatch.recipes.load import MeasuredJob
from tests.cli.small import SPEC
from tests.raising import raises


def ways(effective: int = 16, micro: int = 2, devices: int = 2) -> dict[str, Way]:
    """Return the ways by name."""
    found = ways_of(effective_batch_size=effective, micro_batch_size=micro, num_devices=devices)
    return {way.name: way for way in found}


def test_a_batch_is_ranks_times_steps_times_micro_batch() -> None:
    """Every way except the small batch covers the effective batch: ranks x micro-batches x their size."""
    for name, way in ways().items():
        product = way.num_ranks * way.num_micro_batches * way.micro_batch_size
        assert product == way.num_samples == (2 if name == "small batch" else 16)


def test_what_cannot_be_run_says_why() -> None:
    """One device runs no multi-device way, and a share of one micro-batch cannot accumulate; each has its reason."""
    alone = ways(devices=1)
    assert {name for name, way in alone.items() if not way.unmeasured} == {"small batch", "native", "accumulated"}
    assert "several devices" in alone["DDP"].unmeasured
    whole = ways(effective=4, micro=2)
    assert "a share of 2 samples is one micro-batch" in whole["DDP accumulated"].unmeasured
    assert not whole["accumulated"].unmeasured


@pytest.mark.parametrize(
    ("effective", "micro", "devices", "code"),
    [(4, 5, 1, "size_out_of_range"), (4, 0, 1, "size_out_of_range"), (2, 1, 3, "too_few_samples")],
)
def test_sizes_that_do_not_fit_are_refused(effective: int, micro: int, devices: int, code: str) -> None:
    """Raise for a micro-batch above the batch, for none, and for fewer samples than devices."""
    with raises(BatchSizeError, code):
        ways(effective, micro, devices)


def test_the_variance_is_that_of_the_samples() -> None:
    """The variance is `sum |g - m|^2 / (n - 1) / |m|^2` over all parameters; an unused parameter adds nothing."""
    values = [{"a": torch.tensor([1.0, 2.0]), "b": None}, {"a": torch.tensor([3.0, 2.0]), "b": None}]
    assert variance_of(values) == pytest.approx(2.0 / (4.0 + 4.0))
    assert variance_of(values[:1]) is None


def result(name: str, seconds: float, error: float | None = 1e-7, peak: int = 100) -> WayResult:
    """Return a made-up result of a way."""
    way = ways()[name]
    return WayResult(
        way=way,
        seconds_per_step=seconds,
        quartiles=(seconds, seconds),
        exposed_seconds=None if way.num_ranks == 1 else seconds / 4,
        peak_bytes=peak,
        total_peak_bytes=peak * way.num_ranks,
        reserved_bytes=None,
        driver_bytes=None,
        gradient_bytes=0 if way.num_ranks == 1 else 2048 * (1 if way.strategy else way.num_micro_batches),
        gradient_error=error,
        gradient_variance=0.5 if name == "native" else None,
    )


def report(*results: WayResult, price: float | None = None) -> ComparisonReport:
    """Return a report of made-up results."""
    return ComparisonReport(
        title="made up",
        device="2 x CPU",
        effective_batch_size=16,
        micro_batch_size=2,
        results=results,
        unmeasured={"FSDP accumulated": "no reason"},
        num_samples=3_600_000,
        price_per_hour=price,
    )


def test_what_it_costs() -> None:
    """Device-hours are devices x seconds per sample x samples / 3600; a price adds a cost column."""
    one = result("DDP accumulated", 1.6)
    assert one.seconds_per_sample == pytest.approx(0.1)
    assert one.device_hours(3_600_000) == pytest.approx(200.0)
    lines = str(report(one, price=2.0)).splitlines()
    assert next(line for line in lines if "device-hours/3,600,000" in line).split()[-1] == "price"
    assert [line.split()[-2:] for line in lines if line.startswith("DDP")][1] == ["200", "400"]


def test_what_the_figures_say() -> None:
    """The report names the fastest way, accumulated against native, the gain of no_sync, and wrong gradients."""
    text = str(
        report(
            result("native", 1.0, peak=400),
            result("accumulated", 1.5, peak=100),
            result("DDP without no_sync", 1.0),
            result("DDP accumulated", 0.5, error=0.2),
        )
    )
    assert "fastest: DDP accumulated, 32.0 samples/s." in text
    assert "25% of the memory, 1.50 times the time" in text
    assert "2.00 KiB reduced per step instead of 8.00 KiB, 2.00 times the speed" in text
    assert "gradients that differ from the unsplit batch: DDP accumulated." in text
    assert "  FSDP accumulated: no reason" in text


def test_a_variance_is_handed_on_with_the_gradient_only() -> None:
    """A way with the native gradient gets its variance; one with another gradient or batch does not."""
    native = result("native", 1.0)
    assert result("accumulated", 1.0).with_variance_of(native).gradient_variance == 0.5
    assert result("accumulated", 1.0, error=0.1).with_variance_of(native).gradient_variance is None
    assert result("small batch", 1.0, error=None).with_variance_of(native).gradient_variance is None


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
    for one in measured.results:
        if one.way.name == "small batch":
            assert one.gradient_error is None
        else:
            assert one.gradient_error is not None
            assert one.gradient_error < 1e-5, one.way.name
        assert one.seconds_per_step > 0
        assert one.total_peak_bytes >= one.peak_bytes > 0


@pytest.mark.ranks
def test_bytes_are_those_of_the_gradient(measured: ComparisonReport) -> None:
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
def test_a_small_batch_has_more_variance(measured: ComparisonReport) -> None:
    """The gradient of an eighth of the samples varies more from batch to batch."""
    by_name = {one.way.name: one.gradient_variance for one in measured.results}
    small, native = by_name["small batch"], by_name["native"]
    assert small is not None
    assert native is not None
    assert small > native
    assert by_name["DDP accumulated"] == native


@pytest.mark.ranks
def test_it_is_drawn_and_written(measured: ComparisonReport, tmp_path: Path) -> None:
    """The picture shows every way, and the values can be written as JSON."""
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
    assert "accumulated against native" in printed
    assert "DDP: it needs several devices, and one is used" in printed
    assert len(json.loads(file.read_text(encoding="utf-8"))["results"]) == 3


def test_gpus_that_are_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """If there are fewer GPUs than requested, the error has both numbers."""
    job = MeasuredJob(recipe=SPEC, config=RunConfig(effective_batch_size=64))
    with raises(UserError, "too_few_devices"):
        compare(
            job.train_spec, partial(first_batches, job), effective_batch_size=64, num_devices=64, device_type="cuda"
        )
    assert main(["compare", SPEC, "--effective-batch-size", "2", "--devices", "3"]) == Status.USAGE
    assert "3 devices" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--price", "price_per_hour"), ("--seconds", "most_seconds")])
def test_numbers_below_zero_are_refused(option: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A price or time that is not above 0 raises by name, before any rank starts."""
    assert main(["compare", SPEC, "--effective-batch-size", "8", option, "-1"]) == Status.USAGE
    assert f"{name}=-1.0 must be a finite number above 0" in capsys.readouterr().err


def test_useful_ranks_follow_the_network() -> None:
    """Over a free network one sample per rank is still useful; over a slow one, fewer ranks are."""
    made = report(
        *(result("small batch", 0.2, error=None), result("native", 1.6)),
        *(result("DDP accumulated", 1.0), result("DDP without no_sync", 1.0)),
    )
    free, slow = (
        largest_worlds(made, Cluster(link=Link(0.0, rate), control_link=Link(0.0, 1e15))) for rate in (1e15, 1e4)
    )
    assert free == {"DDP accumulated": 16}
    assert slow["DDP accumulated"] < 16
    text = str(dataclasses.replace(made, largest_worlds=free))
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("DDP ")][2:] == ["16", "-"]
    assert largest_worlds(report(result("native", 1.0)), Cluster(link=Link(0.0, 1.0))) == {}
