"""`anybatch memory`: the memory of a recipe's step, as the plan predicts it; and a run's own memory report."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.cli.launch import summary
from anybatch.cli.main import main
from anybatch.cli.memory import record
from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.errors import AnyBatchWarning
from anybatch.memory.counted import MEANINGS, Counted
from anybatch.planner.trace.step_spec import NUM_MICRO_BATCHES
from anybatch.recipes.run_folder import RunFolder
from anybatch.recipes.session import SessionResult
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC, step_bytes

NUM_WEIGHTS = 3 * 8 + 8 + 8 + 1
ALLOCATED = "allocated on rank 0: tensors and the workspaces of kernels, as an allocator hands them out"


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the output of the command."""
    assert main(["memory", SPEC, *words]) == Status.DONE
    return capsys.readouterr().out.splitlines()


def test_a_step_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The second step of the recipe is measured, so AdamW's moments exist from its beginning."""
    lines = printed(capsys, "--micro-batch-size", "3")
    text = "\n".join(lines)

    assert lines[0] == "one step of 8 samples, 3 micro-batches on this rank, cpu"
    assert lines[1].startswith("peak ")
    assert lines[2].startswith("[www")
    assert re.search(rf"w weights +{8 * NUM_WEIGHTS} bytes", text)
    assert re.search(rf"o optimizer +{16 * NUM_WEIGHTS + step_bytes()} bytes", text)


def test_a_step_is_booked_without_its_loading() -> None:
    """Loading counts only the batch, not an in-memory data set or its single samples."""
    report = record(SPEC, RunConfig(micro_batch_size=8), limit=None, allocator=False)
    course = report.timeline

    assert course.held_bytes[:, course.categories.index("inputs")].max() == 8 * (3 + 1) * 8
    booked = {name for name, phase in zip(course.operations, course.phases, strict=True) if phase == "setup"}
    assert booked <= {"", "aten.full.default"}  # the divisors of a step's losses


def test_a_limit_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a limit the output ends with the free rest; a figure is written only on request."""
    figure = tmp_path / "figures" / "memory.svg"
    lines = printed(capsys, "--limit", "1MiB", "--figure", str(figure))

    assert " of 1.00 MiB, 99% left: " in lines[-2]
    assert "headroom of 15% kept" in lines[-2]
    assert lines[-1] == f"wrote {figure}"
    assert figure.exists()


@pytest.mark.parametrize("num_samples", [25, 49, 64])
def test_a_whole_batch_is_measured(num_samples: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A full batch is measured even if the epoch of 50 samples ends with a smaller one, or has only one batch."""
    with pytest.warns(AnyBatchWarning) if num_samples > 50 else nullcontext():
        lines = printed(capsys, "--effective-batch-size", str(num_samples))

    assert lines[0].startswith(f"one step of {min(num_samples, 50)} samples, ")


def outcome(folder: Path, peak_bytes: int | None, limit_bytes: int | None) -> SessionResult:
    """Return the result of a session with this peak."""
    return SessionResult(
        folder=RunFolder(folder),
        stopped=False,
        num_steps=1,
        num_session_steps=1,
        num_session_samples=8,
        session_seconds=1.0,
        stepping_seconds=1.0,
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        loss=None,
        metrics={},
        checkpoint=None,
    )


@pytest.mark.parametrize(
    ("peak_bytes", "limit_bytes", "said"),
    [
        (None, None, None),
        (2**29, None, "peak 512 MiB (resident memory of the rank 0 process)"),
        (2**33, 2**34, f"peak 8.00 of 16.0 GiB, 50% left: headroom of 15% kept; {ALLOCATED}"),
        (2**34 - 1, 2**34, f"peak 16.0 of 16.0 GiB, 0% left: headroom of 15% used up; {ALLOCATED}"),
    ],
)
def test_a_run_says_its_memory(tmp_path: Path, peak_bytes: int | None, limit_bytes: int | None, said: str) -> None:
    """The summary of a run has the peak, and the free rest with a limit; unknown values are left out."""
    lines = summary(outcome(tmp_path, peak_bytes, limit_bytes), tensorboard="").splitlines()

    assert [line[13:] for line in lines if line.startswith("memory")] == ([] if said is None else [said])


NUM_VALUES, LENGTH, NUM_WINDOWS = 50, 12, 64


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of one long tensor, which is in memory regardless of a step's samples."""

    def __init__(self) -> None:
        self.values = torch.arange(NUM_WINDOWS * LENGTH + 1) % NUM_VALUES

    def __len__(self) -> int:
        return NUM_WINDOWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.values[index * LENGTH : (index + 1) * LENGTH + 1]
        return {"values": piece[:-1], "labels": piece[1:]}


def of_windows(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy over the labels."""
    return functional.cross_entropy(model(batch["values"]).flatten(0, 1), batch["labels"].flatten())


def windows_job() -> ab.Job:
    """Return a job whose loss counts labels, so that a step loads all of them before it runs."""
    return ab.Job(
        model=lambda: nn.Sequential(nn.Embedding(NUM_VALUES, 8), nn.Linear(8, NUM_VALUES)),
        optimizer=lambda named, rate: torch.optim.AdamW([p for _, p in named], lr=rate),
        loss=ab.mean_over_tokens(of_windows, shift=False),
        dataset=Windows,
        defaults=ab.RunConfig(effective_batch_size=32, steps=4, learning_rate=1e-3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "micro_batch_size", "number_bytes"),
    [(SPEC, 4, 8), (SPEC, 2, 8), ("tests.cli.test_memory:windows_job", 8, 4)],
    ids=["two", "four", "windows"],
)
def test_plan_and_memory_agree(recipe: str, micro_batch_size: int, number_bytes: int) -> None:
    """The tensor memory of a step is the same number of bytes in the CPU plan and in the measurement.

    The plan counts two micro-batches; a step keeps one number, its loss, for each further one.
    """
    measured = record(recipe, RunConfig(micro_batch_size=micro_batch_size), limit=None, allocator=False)
    plan = ab.plan(recipe, device="cpu:8GiB", micro_batch_size=micro_batch_size, proposals=False)

    assert measured.counted == "in tensors"
    num_further = plan.accumulation_steps - NUM_MICRO_BATCHES
    assert plan.baseline.peak.num_bytes + num_further * number_bytes == measured.peak_bytes


def test_the_page_has_the_same_words() -> None:
    """docs/memory.md describes each way of counting with the same words as the output."""
    text = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    section = text[text.index("### What each verb counts") :].split("\n### ")[0]

    assert {way for way in get_args(Counted) if f"| {way} | {MEANINGS[way]} |" not in section} == set()
