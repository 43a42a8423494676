"""Memory of a step at any micro-batch size, extrapolated from traces of a few."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.trace import (
    MemoryEnvelope,
    Peak,
    Polynomials,
    check,
    check_same_structure,
    fit,
    in_order,
)
from anybatch.planner.caching_allocator import largest_that_fits, replay
from anybatch.planner.operations import OperationRecorder
from anybatch.planner.step_time import CostLine, CostTrace, fit_costs
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.fake_ranks import joint_limit
from anybatch.planner.trace.step_spec import StepSpec, built, samples_in_memory
from anybatch.planner.trace.step_trace import StepTrace, StepTracer, trace_step, without_garbage_collection

TRACED = (2, 3)
"""Micro-batch sizes to trace. A single sample is special: axes may be squeezed, and BatchNorm rejects it."""
_FURTHER = 5
_DRAWN = " The values are drawn by torch.rand: set the probability to 0, and the step can be planned."
Binding = Literal["tensors", "allocator", "optimizer step", "batch", "branch"]
"""The limit that a larger micro-batch would exceed; "batch" if the whole rank share fits, "branch" if the step runs
other operations above it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Envelopes:
    """Memory and cost of a step at any micro-batch size."""

    steady: MemoryEnvelope  # every step except the first
    first: MemoryEnvelope
    verdict: Literal["exact", "quadratic"]  # "exact" if a third trace matched the prediction
    checked_at: int  # the micro-batch size of the third trace; the larger of the first two if nothing fits
    profile: Profile  # the device type of the allocations
    costs: CostLine  # costs of the step's operations, at any micro-batch size
    notes: tuple[str, ...]  # notes for the user about the traces
    sharded: bool = False  # the strategy shards the weights and gathers them in every micro-batch
    decisions: Mapping[str, str] = field(default_factory=dict)  # the engine's decisions while it was built, by topic
    bound: int | None = None  # the largest size at which the step still runs the same operations
    alone: "Envelopes | None" = None  # envelopes of a step with one micro-batch, if requested

    def peak_bytes(self, m: int) -> int:
        """Return the peak of live tensors in any step."""
        return max(self.steady.peak_bytes(m), self.first.peak_bytes(m))

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size whose tensors fit in every step; None for no limit."""
        return _smaller(self.steady.largest(budget_bytes), self.first.largest(budget_bytes), self.bound)

    def largest_allocated(self, limit_bytes: int, *, expandable: bool = False) -> int | None:
        """Return the largest micro-batch size for which the allocator stays within a limit; None for no limit.

        The CPU allocator does not cache, so there it is the largest size whose tensors fit.
        """
        if self.profile == "cpu":
            return self.largest(limit_bytes)
        both = (largest_that_fits(one, limit_bytes, expandable=expandable) for one in (self.steady, self.first))
        return _smaller(*both, self.bound)

    def binding(self, size: int, usable_bytes: int, most_samples: int) -> Binding:
        """Return the limit that the next larger micro-batch size would exceed."""
        if size >= most_samples:
            return "batch"
        if size == self.bound:
            return "branch"
        # If the tensors fit, the allocator's rounding and fragmentation are the limit.
        if self.peak_bytes(size + 1) <= usable_bytes:
            return "allocator"
        return "optimizer step" if self.at_peak(size + 1).phase == "update" else "tensors"

    def at_peak(self, m: int) -> Peak:
        """Return the moment of peak memory in any step."""
        later = self.steady.peak_bytes(m) >= self.first.peak_bytes(m)
        return (self.steady if later else self.first).at_peak(m)

    def reserved_bytes(self, m: int, *, expandable: bool = False) -> int:
        """Return the memory that the allocator reserves without a limit, at micro-batch size `m`."""
        if self.profile == "cpu":
            return self.peak_bytes(m)
        return max(
            replay(one.trace.events, one.sizes(m), expandable=expandable, pools=one.trace.pools).peak_reserved_bytes
            for one in (self.steady, self.first)
        )


@without_garbage_collection()
def find_envelopes(spec: StepSpec, usable_bytes: int, *, most_samples: int | None = None) -> Envelopes:
    """Trace two micro-batch sizes, and check the prediction with a third, the largest that seems to fit.

    Raises:
        CannotPlanError: the step cannot be traced, or its memory cannot be extrapolated.
    """
    ready, reason = built(spec)
    notes = [] if reason is None else [f"the model could not be created on the meta device: {reason}"]
    found = _found(ready, usable_bytes, most_samples=most_samples, notes=notes)
    num_there = samples_in_memory(ready, most_samples)
    if num_there is None:
        return found
    steady, first = (_with_inputs(one, num_there, spec.num_micro_batches) for one in (found.steady, found.first))
    return dataclasses.replace(found, steady=steady, first=first)


def with_alone(found: Envelopes, spec: StepSpec, usable_bytes: int, share: int) -> Envelopes:
    """Return envelopes with a plan for a single micro-batch too, if a rank share may fit into one.

    In such a step, activations and gradients of an earlier micro-batch do not coexist, which saves up to a fifth.
    """
    largest = found.largest(usable_bytes)
    near = largest is None or 2 * largest >= share
    if not near or found.sharded or joint_limit(built(spec)[0]) is not None:
        return found
    return dataclasses.replace(
        found, alone=find_envelopes(dataclasses.replace(spec, num_micro_batches=1), usable_bytes, most_samples=share)
    )


def _with_inputs(envelope: MemoryEnvelope, num_samples: int, num_micro_batches: int) -> MemoryEnvelope:
    """Return the envelope of a step whose inputs are `num_samples` samples instead of the traced micro-batches."""
    sizes = envelope.allocated
    is_input = torch.tensor([one.category == "inputs" for one in envelope.trace.allocations], dtype=torch.bool)
    whole = sizes.constant + sizes.slope * num_samples // num_micro_batches
    return envelope.with_sizes(
        Polynomials(torch.where(is_input, whole, sizes.constant), sizes.slope.masked_fill(is_input, 0), sizes.curvature)
    )


def _found(ready: StepSpec, usable_bytes: int, *, most_samples: int | None, notes: Sequence[str]) -> Envelopes:
    """Return the envelopes of a built spec."""
    low, high = TRACED
    first, recorder = _first_trace(ready, low)
    traces, recorders = {low: first}, {low: recorder, high: OperationRecorder()}
    notes = [*notes, *traces[low].notes]
    if _reads(traces[low]):
        _refuse_dependence(ready, traces[low])
        notes = [*notes, "the step reads numbers from tensors; its memory did not depend on them in a test"]
    try:
        # With the same tracer, checking a third size takes one more step instead of a new trace.
        with StepTracer(ready) as tracing:
            traces[high] = tracing.begin(high, recorders[high])
            found = _fitted(ready, traces, [recorders[m].trace() for m in TRACED], tuple(notes))
            if found.steady.peak_bytes(1) > usable_bytes:
                # Nothing fits: skip the check, which would only make the missing memory more exact.
                return dataclasses.replace(found, checked_at=high)
            most_samples = _smaller(most_samples, joint_limit(ready))
            size = _further(_smaller(found.largest(usable_bytes), most_samples), TRACED)
            if _matches_prediction(tracing, size, found.steady):
                return dataclasses.replace(found, checked_at=size)
        return _checked(ready, traces, found, usable_bytes, most_samples=most_samples)
    except CannotPlanError:
        raise
    except PlanError as error:
        message = f"cannot plan, will probe: {error}"
        raise CannotPlanError(message) from error


def _first_trace(ready: StepSpec, size: int) -> tuple[StepTrace, OperationRecorder]:
    """Return the trace of a step at a micro-batch size, and the recorder of its operations."""
    recorder = OperationRecorder()
    trace = trace_step(ready, size, recorder=recorder)
    if trace.sharded:
        # Trace again: the first time, torch creates full-size tensors to infer how each operation is sharded.
        recorder = OperationRecorder()
        trace = trace_step(ready, size, recorder=recorder)
    return trace, recorder


def _fitted(
    spec: StepSpec, traces: dict[int, StepTrace], costs: Sequence[CostTrace], notes: tuple[str, ...]
) -> Envelopes:
    """Fit envelopes to the first two traces."""
    low, high = TRACED
    return Envelopes(
        steady=fit(traces[low].steady, low, traces[high].steady, high),
        first=fit(traces[low].first, low, traces[high].first, high),
        verdict="exact",
        checked_at=0,
        profile=spec.profile,
        costs=fit_costs(costs[0], low, costs[1], high),
        notes=notes,
        sharded=traces[low].sharded,
        decisions=traces[low].decisions,
    )


def _matches_prediction(tracing: StepTracer, size: int, envelope: MemoryEnvelope) -> bool:
    """Return whether one more step, at another size, matches every allocation of an envelope.

    This takes half the time of a new trace, which is only needed if the step does not match.
    """
    try:
        return check(envelope, tracing.next_step(size), size).verdict == "exact"
    except PlanError:
        return False


def _checked(
    spec: StepSpec, traces: dict[int, StepTrace], found: Envelopes, usable_bytes: int, *, most_samples: int | None
) -> Envelopes:
    """Check envelopes with new traces; fit quadratics if necessary."""
    for _ in range(3):  # affine, quadratic, and quadratic at the size that it predicts
        size = _further(_smaller(found.largest(usable_bytes), most_samples), tuple(traces))
        if not _same_at(spec, size, traces, found):
            bound = _bound(spec, size, traces, found)
            found = dataclasses.replace(found, bound=bound, notes=(*found.notes, _of_branch(bound, size)))
            size = bound
        if size in found.steady.traced:  # the bound is the largest of the first sizes
            return dataclasses.replace(found, checked_at=size)
        steady = check(found.steady, traces[size].steady, size)
        first = check(found.first, traces[size].first, size)
        if steady.verdict == first.verdict == "exact":
            return dataclasses.replace(found, checked_at=size)
        found = dataclasses.replace(found, steady=steady.envelope, first=first.envelope, verdict="quadratic")
    message = f"memory at micro-batch sizes {sorted(traces)} is neither linear nor quadratic in the size."
    raise PlanError(message)


def _same_at(spec: StepSpec, size: int, traces: dict[int, StepTrace], found: Envelopes) -> bool:
    """Trace another size, and return whether the step runs the same operations."""
    try:
        traces[size] = trace_step(spec, size)
        for envelope, trace in ((found.steady, traces[size].steady), (found.first, traces[size].first)):
            check_same_structure(envelope.trace, envelope.traced[0], in_order(trace), size)
    except PlanError:  # the step fails at this size, or runs other operations
        traces.pop(size, None)
        return False
    return True


def _bound(spec: StepSpec, above: int, traces: dict[int, StepTrace], found: Envelopes) -> int:
    """Find the largest size below `above` at which the step runs the same operations, by bisection."""
    low, high = max(size for size in traces if size in found.steady.traced), above
    while high - low > 1:
        middle = (low + high) // 2
        if _same_at(spec, middle, traces, found):
            low = middle
        else:
            high = middle
    return low


def _of_branch(bound: int, size: int) -> str:
    return (
        f"the step runs other operations at a micro-batch size of {size} than at {bound}: the plan is limited to "
        f"{bound}; try larger sizes on the device"
    )


def _further(size: int | None, traced: tuple[int, ...]) -> int:
    """Return the size to check: the planned one, or a small one if that has been traced."""
    if size is not None and size > max(TRACED) and size not in traced:
        return size
    return next(other for other in range(_FURTHER, _FURTHER + len(traced) + 1) if other not in traced)


def _reads(trace: StepTrace) -> bool:
    return bool(trace.numbers_read or trace.truths_read)


def _refuse_dependence(spec: StepSpec, trace: StepTrace) -> None:
    """Reject a step whose memory depends on the numbers that it reads from tensors."""
    m = TRACED[0]
    what = (
        f"cannot plan, will probe: the step reads {trace.numbers_read} numbers and {trace.truths_read} truth values "
        f"from tensors while it computes{trace.read_at}, and its memory depends on them"
    )
    first, second = in_order(trace.steady), in_order(trace_step(spec, m, other_answers=True).steady)
    try:
        check_same_structure(first, m, second, m)
    except PlanError as error:
        message = f"{what}: other values lead to other operations.{_DRAWN if trace.is_drawn else ''}"
        raise CannotPlanError(message) from error
    if [one.num_bytes for one in first.allocations] != [one.num_bytes for one in second.allocations]:
        message = f"{what}: other values lead to other tensor sizes."
        raise CannotPlanError(message)


def _smaller(*sizes: int | None) -> int | None:
    """Return the smallest size; None means no limit."""
    return min((size for size in sizes if size is not None), default=None)
