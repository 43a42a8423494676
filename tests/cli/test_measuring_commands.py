"""`anybatch check`, `tune` and `scale`: exact recipes, tables, pictures, logs and forecasts."""

import json
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.cli.small import SPEC
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")

RECIPE = """
import random
import torch
import anybatch as ab


def loss(model, batch):
    return {loss}


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""
LOSSES = {
    'torch.nn.functional.mse_loss(model(batch), 2 * batch, reduction="sum")': (Status.NOT_EXACT, "not equal"),
    "model(batch * torch.tensor([[random.random()] for _ in batch])).square().mean()": (
        Status.UNDECIDED,
        "undecided",
    ),
}


@pytest.mark.slow
def test_recipes_are_exact(capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in recipe is exact in every cut, and the exit status is 0."""
    status = main(["check", "digits", "--samples", "5", "--micro-batch-size", "2"])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "2 x 2 + 1" in printed
    assert "verdict: exact" in printed


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_wrong_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str) -> None:
    """A sum declared as a mean, and numbers drawn by sample, each have a separate exit status and verdict."""
    status, verdict = LOSSES[loss]
    file = tmp_path / f"{verdict.replace(' ', '_')}.py"
    file.write_text(RECIPE.format(loss=loss), encoding="utf-8")

    assert main(["check", str(file), "--samples", "6"]) == status
    assert f"verdict: {verdict}" in capsys.readouterr().out


@pytest.mark.slow
def test_tune_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    """The requested sizes are in the table, and one is recommended, or the report says why none is."""
    words = f"{SPEC} --effective-batch-size 20 --micro-batch-size 5 --micro-batch-size 20"
    status = main(["tune", *words.split()])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "20 samples per step" in printed
    rows = [line.split()[:2] for line in printed.splitlines() if line.strip()[:1].isdigit()]
    assert ["5", "4"] in rows
    assert ["20", "1"] in rows
    assert "recommended: micro_batch_size=" in printed or "no recommendation: " in printed


def scale(words: str) -> int:
    """Run `anybatch scale` and return its exit status."""
    return main(["scale", *words.split()])


@pytest.mark.slow
@pytest.mark.ranks
def test_scale_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has one and two ranks, a bucket size is recommended, and both files are written."""
    picture, found = tmp_path / "scale.png", tmp_path / "scale.json"
    words = f"{SPEC} --micro-batch-size 2 --seconds 1 --bucket 1KiB --figure {picture} --json {found}"
    status = scale(words)

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "  2 ranks" in printed
    assert "exposed communication" in printed
    assert "bucket" in printed
    assert picture.exists()
    assert json.loads(found.read_text())["evidence"]["2"]["num_samples"] == 8


@pytest.mark.slow
def test_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe is timed on this machine, its gradients are counted, and the picture is written."""
    picture = tmp_path / "forecast.png"
    words = f"{SPEC} --forecast 8 --link 1Gbit,1ms --micro-batch-size 4 --effective-batch-size 16 --figure {picture}"
    assert scale(words) == Status.DONE

    printed = capsys.readouterr().out
    assert printed.startswith(f"{SPEC}: forecast from times of one rank")
    assert "328 bytes of gradients" in printed  # (3 x 8 + 8 + 8 + 1) float64
    assert "4 x 4" in printed
    assert picture.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [("--forecast 8", "--link 400Gbit,5us"), ("--forecast 8 --link 10", "'10' is not a link")],
)
def test_missing_arguments(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names each missing or wrong option of a forecast, with an example."""
    assert scale(words) == Status.USAGE
    assert said in capsys.readouterr().err
