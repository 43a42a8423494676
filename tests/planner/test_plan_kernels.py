"""Plans for a CPU: what kernels take for themselves is counted, told, and never in the way."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.planner.budget import budget_of
from anybatch.planner.plan import make_plan
from anybatch.planner.report import Plan
from anybatch.planner.trace.cpu_workspaces import KernelMemory
from anybatch.planner.trace.step_spec import StepSpec
from anybatch.planner.verification import verify
from tests.planner.step_specs import step_spec


def net() -> nn.Module:
    """Return two convolutions and a head."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 64, 4)
    )


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a mean over samples."""
    value: torch.Tensor = model(batch).square().mean()
    return value


SPEC = step_spec(
    net,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    loss=ab.mean_over_samples(loss),
    sample=torch.zeros(1, 3, 12, 12),
    profile="cpu",
)


def planned(spec: StepSpec) -> Plan:
    """Return the plan for 4 MiB."""
    return make_plan(spec, budget_of("cpu:4MiB"), 4096, proposals=False)


@pytest.mark.slow
def test_fewer_samples_fit_where_kernels_count_and_the_plan_says_why() -> None:
    """Kernels were asked, so that the size is smaller than that of the tensors alone; the plan tells with what."""
    plan, alone = planned(SPEC), planned(dataclasses.replace(SPEC, kernels=None))

    assert 0 < plan.micro_batch_size < alone.micro_batch_size
    assert "the kernel of aten.convolution" in str(plan)
    assert "what kernels take for themselves is counted: 4 were run on this CPU, small, with" in str(plan)
    assert "the kernel of" not in str(alone)
    assert "what kernels take" not in str(alone)


@pytest.mark.slow
def test_no_kernel_is_asked_for_another_device() -> None:
    """A plan for a GPU, which is not here, is as if nothing could be asked."""
    spec = dataclasses.replace(SPEC, profile="cuda", kernels=KernelMemory())

    plan = make_plan(spec, budget_of("24GiB"), 4096, proposals=False)

    assert spec.kernels is not None
    assert spec.kernels.num_asked == 0
    assert "kernel" not in "".join(plan.notes)


def test_what_was_not_asked_is_told() -> None:
    """Kernels that are too large to be asked are named, with their size, and planned without."""
    plan = planned(dataclasses.replace(SPEC, kernels=KernelMemory(most_bytes=1 << 15)))

    assert plan.micro_batch_size == planned(dataclasses.replace(SPEC, kernels=None)).micro_batch_size
    assert "what 4 kernels take for themselves is not counted: asking them would take more than 32.0 KiB" in str(plan)


class Erratic(KernelMemory):
    """Answers with what follows no line and no quadratic."""

    num_asked = 1

    def moments(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[int, ...]:
        """Return the cube of the number of samples."""
        del kwargs, result
        return (len(args[0]) ** 3,) if func is torch.ops.aten.convolution.default else ()


@pytest.mark.slow
def test_kernels_do_not_keep_a_step_from_being_planned() -> None:
    """Where no size follows from what kernels say, the plan is that of the tensors, and says so."""
    plan = planned(dataclasses.replace(SPEC, kernels=Erratic()))

    assert plan.micro_batch_size == planned(dataclasses.replace(SPEC, kernels=None)).micro_batch_size
    assert "what kernels take for themselves is not counted: it does not follow from traces" in str(plan)


def test_verification_compares_tensors_with_tensors() -> None:
    """What the ledger measures is compared with what was planned for tensors, without what is inside kernels."""
    plan = planned(SPEC)

    found = verify(SPEC, plan.baseline, "cpu")

    assert found.planned_bytes == pytest.approx(found.measured_bytes, rel=0.001)
    assert found.planned_bytes < plan.baseline.peak.num_bytes
