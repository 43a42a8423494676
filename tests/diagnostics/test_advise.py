"""Advice on the effective batch size, from the gradient noise and step times of a run or of its log."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.cli.command import plain
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.gradient_noise import BatchCost, GradientNoise
from anybatch.diagnostics.advise import Advice
from anybatch.errors import UserError
from tests.raising import raises

COST = BatchCost(critical_batch_size=400.0, overhead_seconds=0.1, seconds_per_sample=0.001)
KNOWN = Advice(size=64, micro_batch_size=16, cost=COST, interval=(300.0, 600.0), num_measured=50)
Batch = dict[str, torch.Tensor]


def test_known_values_are_printed() -> None:
    """The advice prints the best batch, its interval, half and twice the batch, and whether accumulating pays."""
    said = str(KNOWN)

    assert KNOWN.best == pytest.approx(200.0)
    assert KNOWN.best_interval == pytest.approx((math.sqrt(300 * 100), math.sqrt(600 * 100)))
    assert [row.name for row in KNOWN.table] == ["half", "now", "twice", "best"]
    assert KNOWN.table[2].samples == pytest.approx(2 * (1 + 400 / 128) / (1 + 400 / 64))
    assert "time-optimal effective batch: 200 samples (95% interval 173 to 245)" in said
    gain = 1 - COST.seconds(200, by=16)
    assert f"pays here: it reaches a loss in {gain:.0%} less time than a batch of 16 (one micro-batch)." in said


def test_advice_against_accumulating() -> None:
    """With almost no overhead the best batch is below one micro-batch, so accumulating does not pay."""
    little = replace(KNOWN, cost=replace(COST, overhead_seconds=1e-4))

    assert little.best < 16
    assert little.gain_of_accumulating == 0.0
    assert "Accumulating does not pay here: it reaches a loss in 0% less time" in str(little)


def test_unknown_bounds_are_printed() -> None:
    """Without an upper bound the advice is "at least", by the lower bound; without a lower bound nothing is advised."""
    least = replace(KNOWN, cost=COST.at(math.inf), interval=(300.0, math.inf))
    nothing = replace(KNOWN, cost=COST.at(math.nan), interval=(0.0, math.inf))

    assert "time-optimal effective batch: at least 173 samples (95% interval at least 173)" in str(least)
    assert least.table[0].seconds == pytest.approx(COST.at(300.0).seconds(32, by=64))
    assert str(nothing).endswith("No advice yet: measure more steps.")
    for advice in (KNOWN, least, nothing):
        json.dumps(plain(advice), allow_nan=False)


def noisy_batches() -> Iterator[Batch]:
    """Yield batches of a regression with noisy targets."""
    generator = torch.Generator().manual_seed(5)
    while True:
        x = torch.randn(32, 4, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True) + 2 * torch.randn(32, 1, generator=generator)}


def squared(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error."""
    return F.mse_loss(model(batch["x"]), batch["y"])


def made_engine(noise: GradientNoise | None = None) -> ab.Engine:
    """Return an engine of a linear regression."""
    torch.manual_seed(6)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return ab.Engine(model, optimizer, ab.mean_over_samples(squared), micro_batch_size=4, noise=noise)


@pytest.mark.slow
def test_advice_on_a_given_engine() -> None:
    """Advice on an engine trains the requested steps and has sizes, noise, times and learning rates."""
    engine = made_engine(GradientNoise(every=2))
    advice = ab.advise(engine, noisy_batches(), steps=40)

    assert engine.num_steps == 40
    assert (advice.size, advice.micro_batch_size, advice.num_measured) == (32, 4, 20)
    assert advice.cost.overhead_seconds > 0
    noise = advice.cost.critical_batch_size if advice.is_known else advice.interval[0]
    gain, kappa = (1 + noise / 32) / (1 + noise / round(advice.best)), round(advice.best) / 32
    assert list(advice.learning_rates.values()) == pytest.approx([0.02 * gain, 0.02 * gain / kappa**0.5])


def test_advice_without_noise_is_refused(tmp_path: Path) -> None:
    """Advice without measured noise raises with the setting to add."""
    with raises(UserError, "unmeasured_noise"):
        ab.advise(made_engine(), noisy_batches(), steps=4)
    with ab.JsonlLog(tmp_path / "events.jsonl"):
        pass
    with raises(UserError, "unmeasured_noise"):
        ab.advise(tmp_path)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch advise` trains and measures a recipe, or reads the log of a measured run."""
    run, found = tmp_path / "run", tmp_path / "advice.json"
    recipe = "tests.cli.small:job"
    assert main(["advise", recipe, "--steps", "30", "--json", str(found)]) == Status.DONE
    assert "time-optimal effective batch" in (printed := capsys.readouterr().out) or "No advice yet" in printed
    assert json.loads(found.read_text())["num_measured"] == 13  # two steps had one micro-batch

    words = ["train", "tests.cli.small:measured_job", "--micro-batch-size", "2", "--out", str(run)]
    assert main(words) == Status.DONE
    capsys.readouterr()
    assert main(["advise", "--log", str(run)]) == Status.DONE
    assert "18 measured steps" in capsys.readouterr().out
