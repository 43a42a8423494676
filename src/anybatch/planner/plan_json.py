"""Convert a plan to plain values for programs: bytes, seconds and names."""

from collections.abc import Mapping
from typing import Any

from anybatch.planner.cost.step_time import StepSeconds
from anybatch.planner.proposals.changes import code_of
from anybatch.planner.proposals.fit import Combination, Fit
from anybatch.planner.report import Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values for `json.dumps`. Keys are stable; later versions may add keys.

    Args:
        plan: the plan.
    """
    budget, best = plan.budget, None if plan.answer is None else plan.answer.best
    return {
        "name": plan.name,
        "num_parameters": plan.num_parameters,
        "optimizer": plan.optimizer,
        "precision": plan.precision,
        "asked": [change.name for change in plan.asked],
        "device": {
            "name": None if budget.device is None else budget.device.name,
            "total_bytes": budget.total_bytes,
            "usable_bytes": budget.usable_bytes,
            "headroom": budget.headroom,
        },
        "world_size": plan.batch.world_size,
        "effective_batch_size": plan.batch.num_samples,
        "fits": plan.fits,
        "baseline": _of_fit(plan.baseline),
        "bytes_by_purpose": dict(plan.bytes_by_purpose()),
        "changes": [{"name": one.name, "how": one.how, **_of_fit(one)} for one in plan.changes],
        "answer": None if best is None else _of_combination(best),
        "tried": [] if plan.answer is None else [_of_combination(one) for one in plan.answer.tried],
        "batch_norms": list(plan.batch_norms),
        "notes": [*budget.notes, *plan.notes],
    }


def _of_combination(one: Combination) -> dict[str, Any]:
    return {
        "changes": [change.name for change in one.changes],
        "strategy": one.strategy or None,
        "same_step": one.same_step,
        "costs": {change.name: change.costs for change in one.changes if change.costs},
        "how": code_of(one.changes, one.strategy, one.spec.strategy),
        "why_not": one.why or None,
        **({} if one.fit is None else _of_fit(one.fit)),
    }


def _of_fit(fit: Fit) -> dict[str, Any]:
    return {
        "fits": fit.fits,
        "micro_batch_size": fit.micro_batch_size,
        "accumulation_steps": fit.accumulation_steps,
        "largest": fit.largest,
        "binds": fit.binds,
        "peak_bytes": fit.peak.num_bytes,
        "tensor_bytes": fit.peak.num_bytes,
        "reserved_bytes": fit.reserved_bytes,
        "peak": {"phase": fit.peak.phase, "operation": fit.peak.operation},
        "seconds": None if fit.seconds is None or not fit.fits else _of_seconds(fit.seconds),
    }


def _of_seconds(seconds: StepSeconds) -> Mapping[str, Any]:
    return {
        "total": seconds.total,
        "least": seconds.least,
        "greatest": seconds.greatest,
        "is_calibrated": seconds.is_calibrated,
    }
