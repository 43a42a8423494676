"""Memory figures name what they count, with the same terms in every command, and agree where the terms agree."""

from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional

import anybatch as ab
from anybatch.cli.memory import record
from anybatch.core.run_config import RunConfig
from anybatch.memory.counted import MEANINGS, Counted
from anybatch.planner.trace.step_spec import NUM_MICRO_BATCHES
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC

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
    [(SPEC, 4, 8), (SPEC, 2, 8), ("tests.cli.test_counted:windows_job", 8, 4)],
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
