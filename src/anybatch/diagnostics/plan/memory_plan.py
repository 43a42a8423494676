"""The largest micro-batch size that fits, and what holds the memory when most is held."""

import time
from dataclasses import dataclass
from typing import Literal

from anybatch.core.caching_allocator import largest_that_fits, replay
from anybatch.core.memory_model import (
    MemoryEnvelope,
    Peak,
    check,
    check_same_structure,
    fit,
    fit_quadratic,
    in_order,
)
from anybatch.diagnostics.plan.rows import joint_limit
from anybatch.diagnostics.plan.task import Task, built
from anybatch.diagnostics.plan.tracing import StepTrace, trace_step
from anybatch.errors import CannotPlanError, PlanError

TRACED = (2, 3)
"""Micro-batch sizes that are traced. A single sample is special: axes are squeezed, and BatchNorm refuses it."""
_FURTHER = 5
DEFAULT_HEADROOM = 0.15
"""A safety margin for devices on which nothing has been measured."""

Binding = Literal["tensors", "allocator", "optimizer step", "batch"]
"""What keeps a micro-batch from being larger; "batch" if all of the rank's samples fit at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Envelopes:
    """What a step holds at any micro-batch size.

    Attributes:
        steady: every step but the first.
        first: the first step.
        verdict: "exact" if a further trace was as predicted; "quadratic" if sizes had to be fitted as quadratics.
        checked_at: the micro-batch size of that trace.
        notes: what the user should know of how this was found.
    """

    steady: MemoryEnvelope
    first: MemoryEnvelope
    verdict: Literal["exact", "quadratic"]
    checked_at: int
    notes: tuple[str, ...]

    def peak_bytes(self, m: int) -> int:
        """Return the most that tensors hold at once, in any step."""
        return max(self.steady.peak_bytes(m), self.first.peak_bytes(m))

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size whose tensors fit in every step; None for no limit."""
        return _smaller(self.steady.largest(budget_bytes), self.first.largest(budget_bytes))

    def largest_reserved(self, limit_bytes: int) -> int | None:
        """Return the largest micro-batch size for which CUDA's allocator needs no more; None for no limit."""
        return _smaller(largest_that_fits(self.steady, limit_bytes), largest_that_fits(self.first, limit_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPlan:
    """What fits, and what holds the memory.

    Attributes:
        budget_bytes: the device's memory.
        headroom: the part of it that is left free.
        outside_bytes: what is taken outside of torch's allocator: context, communicators.
        micro_batch_size: the largest that fits and leaves the headroom; 0 if not even one sample does.
        largest_by_tensors: the largest whose tensors fit into the device, without headroom; None for no limit.
        largest_by_allocator: the largest for which the allocator, too, needs no more than the device; None likewise.
        peak: the moment at which most is held, at `micro_batch_size`, or at one sample if nothing fits.
        peak_bytes: the most that tensors hold at that size, in any step.
        reserved_bytes: what the allocator takes for that, if nothing holds it back; on a CPU the same.
        binds: what keeps the size from being larger.
        envelopes: memory at any other size.
        seconds: how long planning took.
    """

    budget_bytes: int
    headroom: float
    outside_bytes: int
    micro_batch_size: int
    largest_by_tensors: int | None
    largest_by_allocator: int | None
    peak: Peak
    peak_bytes: int
    reserved_bytes: int
    binds: Binding
    envelopes: Envelopes
    seconds: float


def plan_memory(
    task: Task,
    budget_bytes: int,
    *,
    headroom: float = DEFAULT_HEADROOM,
    outside_bytes: int = 0,
    most_samples: int | None = None,
) -> MemoryPlan:
    """Return the largest micro-batch size that fits into a device's memory, found without the device.

    Args:
        task: what to train.
        budget_bytes: the device's memory.
        headroom: part of it to leave free.
        outside_bytes: what is taken outside of torch's allocator.
        most_samples: samples of the largest rank share: no micro-batch is larger. None for as many as fit.

    Raises:
        CannotPlanError: the step cannot be traced, or memory does not follow from traces; says why.
        UserError: the engine refuses what it is asked to run.
    """
    start = time.perf_counter()
    usable = int(budget_bytes * (1.0 - headroom)) - outside_bytes
    envelopes = find_envelopes(task, usable, most_samples=most_samples)
    whole = budget_bytes - outside_bytes
    by_tensors = envelopes.largest(whole)
    cuda = task.profile == "cuda"
    by_allocator = envelopes.largest_reserved(whole) if cuda else by_tensors
    fitting = envelopes.largest_reserved(usable) if cuda else envelopes.largest(usable)
    size = _smaller(fitting, most_samples)
    if size is None:
        message = (
            "memory does not grow with the micro-batch size, so any size fits: name most_samples, the samples of the "
            "largest rank share."
        )
        raise PlanError(message)
    shown = max(size, 1)
    steady = envelopes.steady
    reserved = replay(steady.trace.events, steady.sizes(shown)).peak_reserved_bytes if cuda else 0
    return MemoryPlan(
        budget_bytes=budget_bytes,
        headroom=headroom,
        outside_bytes=outside_bytes,
        micro_batch_size=size,
        largest_by_tensors=by_tensors,
        largest_by_allocator=by_allocator,
        peak=steady.at_peak(shown),
        peak_bytes=envelopes.peak_bytes(shown),
        reserved_bytes=max(reserved, envelopes.peak_bytes(shown)),
        binds=_binding(envelopes, usable, size, most_samples),
        envelopes=envelopes,
        seconds=time.perf_counter() - start,
    )


def find_envelopes(task: Task, usable_bytes: int, *, most_samples: int | None = None) -> Envelopes:
    """Trace two micro-batch sizes, and a third one, the largest that seems to fit, to see whether the two tell.

    Raises:
        CannotPlanError: the step cannot be traced, or memory does not follow from traces; says why.
    """
    ready, reason = built(task)
    notes = [] if reason is None else [f"the model was made with its memory, as it cannot be without: {reason}"]
    traces = {m: trace_step(ready, m) for m in TRACED}
    if _reads(traces[TRACED[0]]):
        _refuse_dependence(ready, traces[TRACED[0]])
        notes.append("the step reads numbers from tensors; what it holds was seen not to depend on them")
    try:
        return _checked(ready, traces, usable_bytes, most_samples, tuple(notes))
    except CannotPlanError:
        raise
    except PlanError as error:
        message = f"cannot plan, will probe: {error}"
        raise CannotPlanError(message) from error


def _checked(
    task: Task, traces: dict[int, StepTrace], usable_bytes: int, most_samples: int | None, notes: tuple[str, ...]
) -> Envelopes:
    low, high = TRACED
    steady = fit(traces[low].steady, low, traces[high].steady, high)
    first = fit(traces[low].first, low, traces[high].first, high)
    found = Envelopes(steady=steady, first=first, verdict="exact", checked_at=0, notes=notes)
    for _ in range(3):  # affine, quadratic, and once more at what the quadratic says
        size = _further(_smaller(found.largest(usable_bytes), most_samples, joint_limit(task)), found.steady.traced)
        traces[size] = trace_step(task, size)
        seen = check(found.steady, traces[size].steady, size)
        if seen.verdict == "exact":
            check(found.first, traces[size].first, size)
            return Envelopes(
                steady=found.steady, first=found.first, verdict=found.verdict, checked_at=size, notes=notes
            )
        firsts = [(traces[m].first, m) for m in (low, high, size)]
        found = Envelopes(
            steady=seen.envelope, first=fit_quadratic(firsts), verdict="quadratic", checked_at=size, notes=notes
        )
    message = f"what is held at micro-batch sizes {sorted(traces)} follows no line and no quadratic."
    raise PlanError(message)


def _further(size: int | None, traced: tuple[int, ...]) -> int:
    """Return the size to look at: the one that will be run, unless it has been traced, or a small other one."""
    if size is not None and size > max(TRACED) and size not in traced:
        return size
    return next(other for other in range(_FURTHER, _FURTHER + len(traced) + 1) if other not in traced)


def _reads(trace: StepTrace) -> bool:
    return bool(trace.numbers_read or trace.truths_read)


def _refuse_dependence(task: Task, trace: StepTrace) -> None:
    """Refuse a step that does something else when the numbers it reads from tensors are others.

    Raises:
        CannotPlanError: with what differs.
    """
    m = TRACED[0]
    what = (
        f"cannot plan, will probe: the step reads {trace.numbers_read} numbers and {trace.truths_read} truth values from "
        "tensors while it computes, and what it holds depends on them"
    )
    first, second = in_order(trace.steady), in_order(trace_step(task, m, other_answers=True).steady)
    try:
        check_same_structure(first, m, second, m)
    except PlanError as error:
        message = f"{what}: {error}"
        raise CannotPlanError(message) from error
    if [one.num_bytes for one in first.allocations] != [one.num_bytes for one in second.allocations]:
        message = f"{what}: tensors have other sizes."
        raise CannotPlanError(message)


def _binding(envelopes: Envelopes, usable_bytes: int, size: int, most_samples: int | None) -> Binding:
    """Return what the next larger size would not fit for."""
    if most_samples is not None and size >= most_samples:
        return "batch"
    if envelopes.peak_bytes(size + 1) <= usable_bytes:
        return "allocator"
    return "optimizer step" if envelopes.steady.at_peak(size + 1).phase == "update" else "tensors"


def _smaller(*sizes: int | None) -> int | None:
    """Return the smallest; None stands for no limit."""
    return min((size for size in sizes if size is not None), default=None)

