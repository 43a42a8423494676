"""The effects of mistakes on a step, and splits by length: properties of the recordings and of new runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.diagnostics.loop_check.judged_loop import ROLES
from anybatch_guide.experiments import length_cuts, trainer_losses, wrong_losses
from anybatch_guide.tasks.task import load
from guide.tests.recorded_again import made_again, recording
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")


def data_of(name: str) -> Any:
    """Return the data of a recording."""
    return recording(name)["data"]


@pytest.mark.slow
def test_a_sum_of_four_means_is_four_times_the_gradient() -> None:
    """The loops of the mistakes are run: without division, loss and gradient are four times as large."""
    short = wrong_losses.first_rows(load("digits"), 2 * wrong_losses.BATCH + 21)
    wrong, right = wrong_losses.split("no_division", task=short), wrong_losses.split("right", task=short)

    assert wrong_losses.gradient_error(wrong) == pytest.approx(3, rel=1e-12)
    assert wrong.wrong.losses[0] == pytest.approx(4 * wrong.right.losses[0], rel=1e-12)
    assert wrong_losses.gradient_error(right) < 1e-12
    assert right.wrong.losses == pytest.approx(right.right.losses, rel=1e-12)


@pytest.mark.slow
def test_the_page_has_the_names_and_the_output_of_the_judge() -> None:
    """The page reads pasted loops with the judge's names of parameters, and shows its present output."""
    recorded = data_of("wrong_losses")

    assert recorded["roles"] == dict(ROLES)
    assert recorded["example"] == {"source": wrong_losses.EXAMPLE, "output": wrong_losses.judged(wrong_losses.EXAMPLE)}


@pytest.mark.slow
def test_each_step_is_compared_with_its_samples() -> None:
    """A loop that divides by items has no error, a loop of means has one; this needs no Trainer."""
    rows = trainer_losses.rows_of("digits")
    parts = [rows[0:16], rows[16:21], rows[21:37], rows[37:42]]
    for weights, is_right in (((16 / 21, 5 / 21), True), ((1 / 2, 1 / 2), False)):
        model = trainer_losses.Averaging(load("digits"))
        optimizer = trainer_losses.ComparingOptimizer(model)
        for window in (parts[:2], parts[2:]):
            optimizer.zero_grad()
            for part, weight in zip(window, weights, strict=True):
                micro_batch = {name: torch.stack([row[name] for row in part]) for name in part[0]}
                optimizer.seen.append(micro_batch)
                (model(**micro_batch)["loss"] * weight).backward()
            optimizer.step()

        assert len(optimizer.errors) == 2
        assert all((error < 1e-12) == is_right for error in optimizer.errors)


@pytest.mark.published
def test_trainer_errors_are_reproduced(tmp_path: Path) -> None:
    """New Trainer steps have the recorded errors."""
    pytest.importorskip("accelerate", reason="needs the extra anybatch[peers]")

    assert made_again("trainer_losses", tmp_path) == []


@pytest.mark.slow
def test_recorded_cuts_are_reproduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one cap, the engine runs the recorded micro-batches."""
    cap = length_cuts.CAPS[-2]
    monkeypatch.setattr(length_cuts, "CAPS", (cap,))
    made = length_cuts.run(lambda _: None)

    recorded = [way for way in data_of("length_cuts")["ways"] if way["cap"] == cap]
    assert [way["cuts"] for way in made["ways"]] == [way["cuts"] for way in recorded]
    assert max(way["gradient_error"] for way in made["ways"]) < 1e-12
