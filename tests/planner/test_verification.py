"""Verification compares a plan with a real step."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anybatch as ab
from anybatch.errors import PlanError
from anybatch.planner.budget import budget_of
from anybatch.planner.plan import make_plan
from anybatch.planner.step_spec import built
from anybatch.planner.verification import verify
from tests.planner.step_specs import changed, step_spec


def net() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples."""
    return F.mse_loss(model(batch), batch[:, :4])


SPEC = step_spec(
    net,
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    loss=ab.mean_over_samples(loss),
    sample=torch.ones(1, 16),
    profile="cpu",
)


def test_a_plan_matches_a_step() -> None:
    """The planned memory matches the measured memory of a step, and both are printed."""
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 512, proposals=False)

    found = verify(SPEC, plan.baseline, "cpu")

    assert found.planned_bytes == pytest.approx(found.measured_bytes, rel=0.01)
    assert found.planned_reserved_bytes is None
    assert "planned" in str(found)
    assert "measured" in str(found)


def test_a_wrong_plan_is_detected() -> None:
    """Verification detects a plan for another model."""
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 512, proposals=False)
    wider = changed(SPEC, model=lambda: nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.Linear(512, 4)))

    found = verify(wider, plan.baseline, "cpu")

    assert found.measured_bytes > 1.5 * found.planned_bytes


def test_plans_that_cannot_be_verified() -> None:
    """Specs with several ranks, or with a model that already exists, raise."""
    plan = make_plan(SPEC, budget_of("cpu:1MiB"), 512, proposals=False)
    model = net()

    for spec in (
        dataclasses.replace(SPEC, world_size=2),
        built(SPEC)[0],
        changed(SPEC, model=lambda: model, optimizer=torch.optim.SGD(model.parameters())),
    ):
        with pytest.raises(PlanError, match="can be verified"):
            verify(spec, plan.baseline, "cpu")
