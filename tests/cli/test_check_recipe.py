"""`anybatch check RECIPE`: built-in recipes are exact, and an inexact recipe is reported."""

from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.extras import skip_without

skip_without("sklearn", "anybatch[recipes]")

WRONG = """
import torch
import anybatch as ab


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch), 2 * batch, reduction="sum")


def job():
    return ab.Job(
        model=lambda: torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.arange(64.0)[:, None] / 64,
        defaults=ab.RunConfig(effective_batch_size=16, learning_rate=0.1, epochs=10),
    )
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["digits", "text"])
def test_recipes_are_exact(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A built-in recipe is exact in every cut, and the exit status is 0."""
    status = main(["check", recipe, "--samples", "5", "--micro-batch-size", "2"])

    printed = capsys.readouterr().out
    assert status == Status.DONE
    assert "2 x 2 + 1" in printed
    assert "verdict: exact" in printed


@pytest.mark.slow
def test_wrong_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sum declared as a mean is reported with a separate exit status, the reason and a picture."""
    file = tmp_path / "wrong.py"
    file.write_text(WRONG, encoding="utf-8")
    picture = tmp_path / "errors.svg"

    status = main(["check", str(file), "--samples", "6", "--figure", str(picture)])

    printed = capsys.readouterr().out
    assert status == Status.NOT_EXACT
    assert "adds up over samples and does not average" in printed
    assert "verdict: not equal" in printed
    assert picture.exists()
