"""`anybatch memory`: the memory of a recipe's step, as the plan predicts it; and a run's own memory report."""

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest

import anybatch as ab
from anybatch.cli.launch import summary
from anybatch.cli.main import main
from anybatch.cli.memory import record
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.errors import AnyBatchWarning
from anybatch.memory.device_memory import MEANINGS, Counted
from anybatch.planner.step_spec import NUM_MICRO_BATCHES
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC, run, step_bytes

NUM_WEIGHTS = 3 * 8 + 8 + 8 + 1


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the output of the command."""
    assert main(["memory", SPEC, *words]) == Status.DONE
    return capsys.readouterr().out.splitlines()


def test_loading_is_not_counted() -> None:
    """Loading counts only the batch, not an in-memory data set or its single samples."""
    report = record(SPEC, RunConfig(micro_batch_size=8), limit=None)
    course = report.timeline

    assert course.held_bytes[:, course.categories.index("inputs")].max() == 8 * (3 + 1) * 8
    booked = {name for name, phase in zip(course.operations, course.phases, strict=True) if phase == "setup"}
    assert booked <= {"", "aten.full.default"}  # the divisors of a step's losses


def test_a_step_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second step is measured, so AdamW's moments exist; with a limit the output ends with the free rest."""
    figure = tmp_path / "figures" / "memory.svg"
    lines = printed(capsys, "--micro-batch-size", "3", "--limit", "1MiB", "--figure", str(figure))
    text = "\n".join(lines)

    assert lines[0] == "one step of 8 samples, 3 micro-batches on this rank, cpu"
    assert re.search(rf"weights +{8 * NUM_WEIGHTS} bytes", text)
    assert re.search(rf"optimizer +{16 * NUM_WEIGHTS + step_bytes()} bytes", text)
    assert " of 1.00 MiB, 99% left: headroom of 15% kept" in lines[-2]
    assert lines[-1] == f"wrote {figure}"
    assert figure.exists()


@pytest.mark.parametrize("num_samples", [25, 49, 64])
def test_a_whole_batch_is_measured(num_samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A full batch is measured even if the epoch of 50 samples ends with a smaller one, or has only one batch."""
    with pytest.warns(AnyBatchWarning) if num_samples > 50 else nullcontext():
        lines = printed(capsys, "--effective-batch-size", str(num_samples))

    assert lines[0].startswith(f"one step of {min(num_samples, 50)} samples, ")


def test_a_run_prints_its_memory(tmp_path: Path) -> None:
    """The summary of a run on a device has its peak and the free rest."""
    result = dataclasses.replace(run(tmp_path, stop_after=1), peak_bytes=2**33, limit_bytes=2**34)
    (said,) = [line for line in summary(result, tensorboard="").splitlines() if line.startswith("memory")]
    assert said.split(maxsplit=1)[1].startswith("peak 8.00 of 16.0 GiB, 50% left: headroom of 15% kept; allocated")


@pytest.mark.slow
def test_plan_and_memory_agree() -> None:
    """The tensor memory of a step is the same number of bytes in the CPU plan and in the measurement.

    The plan counts two micro-batches; a step keeps one number, its loss, for each further one.
    """
    measured = record(SPEC, RunConfig(micro_batch_size=2), limit=None)
    plan = ab.plan(SPEC, device="cpu:8GiB", micro_batch_size=2, proposals=False)

    assert measured.counted == "in tensors"
    num_further = plan.accumulation_steps - NUM_MICRO_BATCHES
    assert plan.baseline.peak.num_bytes + num_further * 8 == measured.peak_bytes


def test_the_page_matches_the_output() -> None:
    """docs/memory.md describes each way of counting with the same words as the output."""
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    section = text[text.index("### What each command counts") :].split("\n### ")[0]

    assert {way for way in get_args(Counted) if f"| {way} | {MEANINGS[way]} |" not in section} == set()
