"""Plan a training step without the device: the micro-batch size that fits, memory by purpose, and changes."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

from anybatch.core.splitting import Cut, plan_batch
from anybatch.norms.layers import batch_norms
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.planner.budget import Budget
from anybatch.planner.cost.step_time import Rates, rates_of
from anybatch.planner.proposals.changes import Change, optimizer_name
from anybatch.planner.proposals.fit import (
    PlanTarget,
    best_first,
    envelopes_of,
    find_combination,
    fit_of,
    propose,
    reshaped,
)
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
    fit: bool = False,
    precision_is_open: bool = False,
    asked: Sequence[Change] = (),
    micro_batch_size: int | None = None,
    expandable_segments: bool = False,
) -> Plan:
    """Plan a training step for a device.

    Args:
        spec: the step.
        budget: the device's memory.
        effective_batch_size: samples of one step, over all ranks.
        name: printed name of the recipe, model or class.
        rates: measured rates of the device; None for its data sheet, if it was given by name.
        proposals: also plan every possible change; each takes as long as the plan itself.
        fit: search for a combination of changes that fits, instead of planning each change alone.
        precision_is_open: with `fit`, bf16 or fp16 may be proposed for a step in float32.
        asked: changes requested by the user; changes of the step itself are already in `spec`.
        micro_batch_size: samples of a micro-batch; None for the largest that fits.
        expandable_segments: the allocator uses expandable segments.

    Raises:
        CannotPlanError: the step cannot be traced.
        UserError: the engine rejects the step.
    """
    start = time.perf_counter()
    # A CPU has no device limit for strategies to use.
    spec = dataclasses.replace(spec, device_bytes=None if spec.profile == "cpu" else budget.total_bytes)
    ready, reason = built(spec)
    parameters = list(as_module(ready.trained.model).parameters())
    target = PlanTarget(
        budget=budget,
        effective_batch_size=effective_batch_size,
        rates=rates_of(budget.device) if rates is None and budget.device is not None else rates,
        gradient_bytes=gradient_bytes(p for p in parameters if p.requires_grad),
        micro_batch_size=micro_batch_size,
        expandable_segments=expandable_segments,
    )
    envelopes = envelopes_of(ready, target)
    for change in asked:
        envelopes = envelopes if change.reshape is None else reshaped(envelopes, change)
    baseline = fit_of(spec, envelopes, target, timed=all(change.timed for change in asked))
    changes = propose(spec, envelopes, target, fits=baseline.fits) if proposals and not fit else []
    answer = find_combination(spec, target, precision_is_open=precision_is_open) if fit else None
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
        asked=tuple(asked),
        answer=answer,
        batch_norms=tuple(batch_norms(as_module(ready.trained.model))),
        exact=envelopes.verdict == "exact",
        notes=(
            *_notes_on_building(reason),
            *(_notes_on_decisions(envelopes.decisions) if spec.world_size > 1 else ()),
            *envelopes.notes,
        ),
        seconds=time.perf_counter() - start,
    )


def _notes_on_building(reason: str | None) -> list[str]:
    return [] if reason is None else [f"the model could not be created on the meta device: {reason}"]


def _notes_on_decisions(decisions: Mapping[str, str]) -> list[str]:
    return [f"{name}: {decisions[name]}" for name in ("strategy", "sharding", "reduction") if name in decisions]
