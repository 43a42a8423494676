"""The first screen: its recording, compared with plain loops."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from anybatch_guide.experiments import first_screen
from anybatch_guide.recording import read_recording
from anybatch_guide.tasks.task import MicroBatches, load
from anybatch_guide.training import isolated
from tests.extras import skip_without

skip_without("sklearn", "anybatch[guide]")

RECORDING = Path(__file__).parents[1] / "web" / "recordings" / "first_screen.json"
ROUNDING = 1e-6


def plain_losses(size: int, *, divided: bool, steps: int = 40) -> list[float]:
    """Return the losses of digits in plain PyTorch, in parts of `size`; a step's loss is the full batch's."""
    task = load("digits")
    found: list[float] = []
    loader = MicroBatches(task.rows, 64, 0)
    with isolated():
        torch.manual_seed(0)
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        while len(found) < steps:
            for inputs, targets in itertools.islice(loader, steps - len(found)):
                optimizer.zero_grad()
                total = 0.0
                for part, labels in zip(inputs.split(size), targets.split(size), strict=True):
                    loss = cross_entropy(model(part), labels)
                    (loss * len(part) / len(inputs) if divided else loss).backward()
                    total += loss.item() * len(part) / len(inputs)
                optimizer.step()
                schedule.step()
                found.append(total)
    return found


def test_the_cut_changes_memory_and_no_loss() -> None:
    """In the recording, the peak falls with every smaller part, and losses of all splits differ only by rounding."""
    ways = read_recording(RECORDING).data["ways"]
    peaks = [sum(way["peak"].values()) for way in ways]

    assert [way["micro"] for way in ways] == [64, 32, 16, 8, 4, 2, 1]
    assert peaks == sorted(peaks, reverse=True)
    assert all(way["largest_gap"] < ROUNDING for way in ways)
    assert ways[0]["wrong_losses"] == ways[0]["losses"]  # one part needs no division
    assert all(way["wrong_losses"][-1] > 1.2 * way["losses"][-1] for way in ways[1:])


@pytest.mark.slow
def test_both_courses_are_those_of_a_plain_loop() -> None:
    """The losses of 32 x 2, with and without division, equal a loop of plain PyTorch."""
    way = first_screen.way(32, lambda _: None, done=0)

    assert way["losses"] == pytest.approx(plain_losses(32, divided=True), rel=1e-4)
    assert way["wrong_losses"] == pytest.approx(plain_losses(32, divided=False), rel=1e-2)
