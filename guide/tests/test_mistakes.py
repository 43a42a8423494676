"""The hand-written loops: the correct one equals the engine, the others differ, and the checker finds each mistake."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import anybatch as ab
from anybatch.diagnostics.loop_check.check_loop import check_loop
from anybatch_guide.mistakes.mistake import MISTAKES, loop_of, source_of, wrong_lines
from anybatch_guide.tasks.task import LabelledSamples, MicroBatches, cross_entropy, load, loss

ROOT = Path(__file__).parents[2]
MICRO_BATCH_SIZE, ACCUMULATION_STEPS, NUM_EPOCHS = 8, 4, 2


def rows() -> LabelledSamples:
    """Return 76 points: 2 windows of 4 micro-batches, and a last one of 8 and 4 samples."""
    task = load("spirals")
    return LabelledSamples(task.rows.inputs[:76].double(), task.rows.targets[:76])


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return a network, an optimizer that depends on the gradient's scale, and a scheduler."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = load("spirals").model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)


def vector(model: torch.nn.Module) -> Tensor:
    """Return all parameters as a flat tensor."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def by_loop(name: str, max_norm: float) -> Tensor:
    """Return the parameters after two epochs of a loop."""
    model, optimizer, scheduler = parts()
    loader = MicroBatches(rows(), MICRO_BATCH_SIZE, seed=3)
    for _ in range(NUM_EPOCHS):
        loop_of(name)(
            model,
            loader,
            optimizer=optimizer,
            scheduler=scheduler,
            criterion=cross_entropy,
            accumulation_steps=ACCUMULATION_STEPS,
            max_norm=max_norm,
        )
    return vector(model)


def by_engine(max_norm: float) -> Tensor:
    """Return the parameters after two epochs of the engine."""
    model, optimizer, scheduler = parts()
    engine = ab.Engine(
        model,
        optimizer,
        ab.mean_over_samples(loss),
        micro_batch_size=MICRO_BATCH_SIZE,
        scheduler=scheduler,
        clip=max_norm,
    )
    for batch in ab.batches(
        rows(), effective_batch_size=MICRO_BATCH_SIZE * ACCUMULATION_STEPS, epochs=NUM_EPOCHS, seed=3
    ):
        engine.step(batch)
    return vector(model)


@pytest.mark.parametrize("max_norm", [0.05, 1e9])
def test_the_right_loop_equals_the_engine(max_norm: float) -> None:
    """With a short last window, clipped or not, the correct loop equals the engine, up to rounding."""
    expected = by_engine(max_norm)

    assert ((by_loop("right", max_norm) - expected).norm() / expected.norm()).item() < 1e-12


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_each_mistake_changes_the_result(name: str) -> None:
    """A loop with a mistake ends with other parameters, by far more than rounding."""
    expected = by_engine(0.05)

    assert ((by_loop(name, 0.05) - expected).norm() / expected.norm()).item() > 1e-4


@pytest.mark.parametrize(
    "name", ["right", "no_division", *(pytest.param(name, marks=pytest.mark.published) for name in list(MISTAKES)[1:])]
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.slow
def test_the_checker_finds_each_mistake(name: str) -> None:
    """`anybatch check --loop` finds nothing in the correct loop, and the expected bug in each other loop."""
    found = {finding.code for finding in check_loop(loop_of(name)).findings}

    assert (MISTAKES[name].finding in found) if name in MISTAKES else not found


@pytest.mark.parametrize("name", MISTAKES)
def test_the_page_marks_the_wrong_lines(name: str) -> None:
    """The page marks exactly the wrong lines of a loop, and shows the complete function."""
    text = (ROOT / "guide" / "web" / "src" / "sections" / "Playground.svelte").read_text()
    shown = re.search(rf'/{name}\.py" lines="(\d+)-(\d+)" mark="([\d-]+)"', text)
    first = loop_of(name).__code__.co_firstlineno
    numbers = [first + number - 1 for number in wrong_lines(name)]

    assert shown is not None
    assert [int(shown[1]), int(shown[2])] == [first, first + len(source_of(name).splitlines()) - 1]
    assert shown[3] == (str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
