"""Makes a plan: the micro-batch size that fits, the memory by purpose, and changes; without the device."""

import dataclasses
import time
from collections.abc import Mapping

from anybatch.core.splitting import Cut, plan_batch
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.planner.budget import Budget
from anybatch.planner.cost.step_time import Rates, rates_of
from anybatch.planner.proposals.changes import optimizer_name
from anybatch.planner.proposals.ranking import PlanTarget, best_first, envelopes_of, fit_of, propose
from anybatch.planner.report import Plan
from anybatch.planner.trace.checkpointing import as_module
from anybatch.planner.trace.step_spec import StepSpec, built


def make_plan(
    spec: StepSpec,
    budget: Budget,
    effective_batch_size: int,
    *,
    name: str = "",
    rates: Rates | None = None,
    proposals: bool = True,
) -> Plan:
    """Plan a training step for a device.

    Args:
        spec: the step.
        budget: the device's memory.
        effective_batch_size: samples of one step, over all ranks.
        name: of the recipe, model or class, as the plan prints it.
        rates: measured rates of the device; None for the data sheet's, where it is known by name.
        proposals: also plan every possible change, which takes as long for each.

    Raises:
        CannotPlanError: the step cannot be traced; says why.
        UserError: the engine refuses what it is asked to run.
    """
    start = time.perf_counter()
    # No device limits the memory of a CPU, so that strategies do not go by it.
    spec = dataclasses.replace(spec, device_bytes=None if spec.profile == "cpu" else budget.total_bytes)
    ready, reason = built(spec)
    # The model is built once here; changes that need another one build their own.
    parameters = list(as_module(ready.trained.model).parameters())
    target = PlanTarget(
        budget=budget,
        effective_batch_size=effective_batch_size,
        rates=rates_of(budget.device) if rates is None and budget.device is not None else rates,
        gradient_bytes=gradient_bytes(p for p in parameters if p.requires_grad),
    )
    envelopes = envelopes_of(ready, target)
    baseline = fit_of(spec, envelopes, target)
    changes = propose(spec, envelopes, target, fits=baseline.fits) if proposals else []
    cut = Cut(micro_batch_size=baseline.micro_batch_size)
    return Plan(
        name=name,
        spec=spec,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        optimizer=optimizer_name(ready.trained),
        precision=ready.trained.precision,
        target=target,
        batch=plan_batch(effective_batch_size, spec.world_size, cut),
        baseline=baseline,
        costs=envelopes.costs,
        changes=tuple(best_first(changes)),
        exact=envelopes.verdict == "exact",
        notes=(*_of_building(reason), *(_told(envelopes.decisions) if spec.world_size > 1 else ()), *envelopes.notes),
        seconds=time.perf_counter() - start,
    )


def _of_building(reason: str | None) -> list[str]:
    return [] if reason is None else [f"the model was made with its memory, as it cannot be without: {reason}"]


def _told(decisions: Mapping[str, str]) -> list[str]:
    """Return what the engine decides about devices, as notes."""
    return [f"{name}: {decisions[name]}" for name in ("strategy", "sharding", "reduction") if name in decisions]


