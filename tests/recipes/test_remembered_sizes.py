"""A job's measured micro-batch size is reused by later runs, unless measured again or given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.run_config import RunConfig
from anybatch.events.jsonl import read_jsonl
from anybatch.planner.measurements import KnownSizes
from anybatch.recipes.session import train


def job() -> ab.Job:
    """Return a job whose steps are long enough to time."""
    return ab.Job(
        model=lambda: nn.Linear(1000, 64),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(lambda model, batch: model(batch).square().mean()),
        dataset=lambda: torch.randn(32, 1000),
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=1e-3, epochs=1),
    )


class Asked(KnownSizes):
    """Counts its look-ups."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, today=lambda: "2030-12-31")
        self.number = 0

    def find(self, circumstances: Mapping[str, Any]) -> Any:
        self.number += 1
        return super().find(circumstances)


def decided(folder: Path) -> str:
    """Return how a run chose its micro-batch size, from the header of its log."""
    header = next(line for line in read_jsonl(folder / "events.jsonl") if line["kind"] == "start")
    return str(header["decisions"]["micro_batch_size"])


def test_the_next_run_takes_it_again(tmp_path: Path) -> None:
    """The first run measures, the second reuses the size, and both logs record it."""
    known = Asked(tmp_path / "sizes.jsonl")
    for name in ("first", "second"):
        train(job(), tmp_path / name, known=known, stop=lambda: False)

    size = decided(tmp_path / "first").partition(",")[0]
    assert "as measured on" not in decided(tmp_path / "first")
    assert decided(tmp_path / "second").startswith(f"{size}, as measured on 2030-12-31 (")
    assert known.number == 2


@pytest.mark.parametrize("size", ["remeasure", 4])
def test_who_does_not_want_to_know(tmp_path: Path, size: Any) -> None:
    """If a size is given or measured again, it is neither looked up nor stored."""
    known = Asked(tmp_path / "sizes.jsonl")
    train(job(), tmp_path / "run", RunConfig(micro_batch_size=size), known=known, stop=lambda: False)

    assert known.number == 0
    assert not known.path.exists()
