"""`ab.plan` for every kind of subject."""

import itertools
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import anybatch as ab
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import UserError
from anybatch.planner.plan import Plan
from anybatch.planner.torch_internals import allocated_sizes


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples."""
    return F.mse_loss(model(batch), batch)


@pytest.mark.slow
def test_a_module_is_planned() -> None:
    """A module with its loss and a sample can be planned, and is not moved or changed."""
    model = nn.Linear(8, 8)
    before = model.weight.clone()

    plan = ab.plan(model, None, loss, torch.zeros(1, 8), device="cpu:64KiB", effective_batch_size=1024)

    assert plan.num_parameters == 72
    assert plan.micro_batch_size > 1
    assert plan.accumulation_steps == -(-1024 // plan.micro_batch_size)
    assert torch.equal(model.weight, before)


@pytest.mark.slow
def test_a_configuration_is_planned() -> None:
    """A transformers configuration is planned for a device by name, with a predicted step time."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )

    plan = ab.plan(config, device="H100", effective_batch_size=64, world_size=8, sequence_length=16, proposals=False)

    assert plan.batch.world_size == 8
    assert plan.micro_batch_size == 8
    assert plan.baseline.seconds is not None
    assert "8 ranks" in str(plan)


def test_a_job_is_planned() -> None:
    """A job is planned at its batch size."""
    job = ab.Job(
        model=lambda: nn.Linear(8, 8),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(loss),
        dataset=lambda: torch.ones(64, 8),
        defaults=ab.RunConfig(effective_batch_size=32, learning_rate=0.1),
    )

    plan = ab.plan(job, device="24GiB", proposals=False)

    assert plan.batch.num_samples == 32
    assert plan.optimizer == "SGD"
    assert plan.baseline.seconds is None


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    """A mask of ones in the sample is left out with a note, as models of transformers do; another mask is kept."""

    def masked(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        rows = model(batch["x"])
        shown: torch.Tensor = rows * batch["attention_mask"].unsqueeze(-1) if "attention_mask" in batch else rows
        return shown.square().mean()

    def of(mask: torch.Tensor) -> Plan:
        sample = {"x": torch.zeros(1, 9, 4), "attention_mask": mask}
        options: dict[str, Any] = {"device": "cpu:8MiB", "effective_batch_size": 8, "proposals": False}
        return ab.plan(lambda: nn.Linear(4, 4), None, ab.mean_over_samples(masked), sample, **options)

    without, kept = of(torch.ones(1, 9, dtype=torch.long)), of(torch.zeros(1, 9, dtype=torch.long))

    assert [any("attention_mask" in note for note in plan.notes) for plan in (without, kept)] == [True, False]
    assert without.baseline.peak.num_bytes < kept.baseline.peak.num_bytes


def test_weights_of_a_module_are_not_trained_by_its_plan() -> None:
    """A step that depends on data, or has workspaces, runs on a copy of the module while it is planned."""

    def positive(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = model(batch)
        return rows[rows > rows.mean()].mean()

    model = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for make in (model, lambda: model):
        plan = ab.plan(
            make, None, ab.mean_over_samples(positive), torch.randn(4, 4), device="cpu:8GiB", effective_batch_size=8,
            proposals=False
        )  # fmt: skip

        assert any("measured with your sample" in note for note in plan.notes)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


@pytest.mark.slow
def test_a_plan_for_a_cpu_includes_workspaces_of_convolutions() -> None:
    """Allocated bytes of a small step are measured, also in plans of its changes; without data, a note tells so."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv3d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv3d(64, 64, 3, padding=1))

    def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = model(batch)
        return rows.square().mean()

    engines: list[ab.Engine] = []

    def step() -> None:
        engines.extend([] if engines else [ab.Engine(make(), sgd, mean, micro_batch_size=5, check_loss=False)])
        engines[0].step(torch.ones(10, 3, 1, 4, 4))

    mean, sgd = ab.mean_over_samples(squares), partial(torch.optim.SGD, lr=0.1)
    options: dict[str, Any] = {"device": "cpu:1GiB", "effective_batch_size": 10, "micro_batch_size": 5}
    sizes = allocated_sizes(step)
    expected = sum(sizes) + max(itertools.accumulate(allocated_sizes(step)))

    measured = ab.plan(make, sgd, mean, torch.ones(1, 3, 1, 4, 4), **options)
    invalid = torch.ones(1, 3, 1, 4, 4, device="meta")
    unknown = ab.plan(make, sgd, mean, invalid, proposals=False, **options)

    assert measured.baseline.peak.num_bytes == pytest.approx(expected, rel=0.02)
    assert unknown.baseline.tensor_bytes == unknown.baseline.peak.num_bytes == measured.baseline.tensor_bytes
    assert measured.baseline.tensor_bytes < 0.7 * expected
    assert measured.changes
    assert all(change.tensor_bytes < 0.7 * change.peak.num_bytes for change in measured.changes)
    assert "allocated, in the backward" in str(measured)
    assert ["workspaces" in note for note in unknown.notes] == [True]


class Block(nn.Module):
    """A layer with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        return F.gelu(self.norm(self.linear(x)))


def deep() -> nn.Module:
    """Return a network of blocks with BatchNorm."""
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 64))


def trained(**fields: Any) -> TrainSpec:
    """Return the spec of the deep network, with some fields changed."""
    defaults: dict[str, Any] = {"model": deep(), "optimizer": partial(torch.optim.SGD, lr=0.1), "loss": loss}
    return TrainSpec(**{**defaults, **fields})


def planned(**fields: Any) -> Plan:
    """Return the plan of a step of 64 samples in a CPU's memory."""
    return ab.plan(
        partial(trained, **fields),
        sample=torch.zeros(1, 64),
        device="cpu:8MiB",
        effective_batch_size=64,
        proposals=False,
    )


def held(plan: Plan) -> Counter[str]:
    """Return the bytes of all allocations of a planned step by category."""
    found: Counter[str] = Counter()
    for one in plan.baseline.envelope.trace.allocations:
        found[one.category] += one.num_bytes
    return found


@pytest.mark.slow
def test_settings_are_planned() -> None:
    """An average is one more copy of the weights, clipping computes norms, and frozen BatchNorm allocates less."""
    weights = sum(parameter.nbytes for parameter in deep().parameters())
    plain, average, frozen = planned(), planned(average_decay=0.9), planned(norms="freeze")
    operations = [
        {one.operation for one in planned(measure_gradient_norm=False, clip=clip).baseline.envelope.trace.allocations}
        for clip in (None, 1.0)
    ]

    assert held(average)["optimizer"] - held(plain)["optimizer"] == weights
    assert any("norm" in name for name in operations[1] - operations[0])
    assert len(frozen.baseline.envelope.trace.allocations) < len(plain.baseline.envelope.trace.allocations)


@pytest.mark.slow
def test_an_existing_model_is_planned_and_unchanged() -> None:
    """A `TrainSpec` is planned at its batch size and precision, and proposed changes do not modify its model."""
    train = trained(effective_batch_size=512, precision="bf16")

    plan = ab.plan(train, sample=torch.zeros(1, 64), device="cpu:8MiB")

    assert (plan.batch.num_samples, plan.precision) == (512, "bf16")
    assert any("checkpointing" in fit.name for fit in plan.changes)
    assert isinstance(train.model, nn.Module)
    assert [str(module) for module in train.model.modules()] == [str(module) for module in deep().modules()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"what": 3}, "cannot be planned"),
        ({"what": nn.Linear(8, 8)}, "needs its loss"),
        (
            {"what": nn.Linear(8, 8), "loss": loss, "sample": torch.zeros(1, 8)},
            r"effective_batch_size \(--effective-batch-size\) is required",
        ),
    ],
)
def test_missing_arguments(arguments: dict[str, object], said: str) -> None:
    """A missing required argument raises with its name."""
    with pytest.raises(UserError, match=said):
        ab.plan(device="24GiB", **arguments)  # type: ignore[arg-type]
