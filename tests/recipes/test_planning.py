"""`ab.plan` from all that can be planned, and `anybatch demo`."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import anybatch as ab
from anybatch.errors import UserError
from anybatch.planner.cost.step_time import Rates
from anybatch.recipes.demonstration import run as demonstration

RATES = Rates(
    name="made up",
    flops_per_second={"fp32": 1e9},
    bytes_per_second=1e9,
    launch_seconds=1e-6,
    band=(0.5, 2.0),
)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples."""
    return F.mse_loss(model(batch), batch)


def test_a_module_is_planned() -> None:
    """A module with its loss and a sample is planned; it is neither moved nor changed."""
    model = nn.Linear(8, 8)
    before = model.weight.clone()

    plan = ab.plan(model, None, loss, torch.zeros(1, 8), device="cpu:64KiB", effective_batch_size=4096)

    assert plan.num_parameters == 72
    assert plan.micro_batch_size > 1
    assert plan.accumulation_steps == -(-4096 // plan.micro_batch_size)
    assert torch.equal(model.weight, before)


def test_a_configuration_is_planned() -> None:
    """A configuration of transformers is planned for a device by name, and says what a step takes there."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )

    plan = ab.plan(config, device="H100", effective_batch_size=64, world_size=8, sequence_length=16, proposals=False)

    assert plan.batch.world_size == 8
    assert plan.micro_batch_size == 8
    assert plan.as_it_is.seconds is not None
    assert not plan.as_it_is.seconds.is_calibrated
    assert "8 ranks" in str(plan)


def test_a_job_brings_what_is_needed() -> None:
    """A job is planned at its own batch size."""
    job = ab.Job(
        model=lambda: nn.Linear(8, 8),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.ones(64, 8),
        defaults=ab.Defaults(effective_batch_size=32, learning_rate=0.1),
    )

    plan = ab.plan(job, device="24GiB", proposals=False)

    assert plan.batch.num_samples == 32
    assert plan.optimizer == "SGD"
    assert plan.as_it_is.seconds is None


def test_time() -> None:
    """With rates a step's time is there."""
    plan = ab.plan(
        nn.Linear(64, 64),
        None,
        loss,
        torch.zeros(1, 64),
        device="1GiB",
        effective_batch_size=256,
        rates=RATES,
        proposals=False,
    )
    seconds = plan.seconds_on(1)

    assert seconds is not None
    assert plan.as_it_is.seconds == seconds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"what": 3}, "cannot be planned"),
        ({"what": nn.Linear(8, 8)}, "planned with its loss"),
        ({"what": nn.Linear(8, 8), "loss": loss, "sample": torch.zeros(1, 8)}, "effective_batch_size must be given"),
    ],
)
def test_what_is_missing(arguments: dict[str, object], said: str) -> None:
    """What a plan cannot do without is asked for."""
    with pytest.raises(UserError, match=said):
        ab.plan(device="24GiB", **arguments)  # type: ignore[arg-type]


def test_three_lines_change() -> None:
    """The two loops of the demonstration differ in three new lines."""
    lines = demonstration.changed_lines()

    assert len([line for line in lines if line.startswith("+")]) == 3
    assert any("optimizer.step()" in line for line in lines if line.startswith("-"))


def test_the_demonstration_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain loop dies of its budget, the other one finishes within it, and the gradient is exact."""
    monkeypatch.setattr(demonstration, "NUM_STEPS", 1)
    said: list[str] = []

    assert demonstration.demonstrate(said.append) == 0

    text = "".join(said)
    assert "OutOfMemoryError" in text
    assert "64 samples = 1 rank x" in text
