"""Memory of a step at any micro-batch size, extrapolated from traces of a few."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from anybatch.core.units import in_bytes
from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.ledger import INSIDE
from anybatch.memory.trace import (
    MemoryEnvelope,
    Peak,
    Polynomials,
    check,
    check_same_structure,
    fit,
    in_order,
)
from anybatch.planner.cost.caching_allocator import largest_that_fits, replay
from anybatch.planner.cost.operations import OperationRecorder
from anybatch.planner.cost.step_time import CostLine, CostTrace, fit_costs
from anybatch.planner.trace.cpu_workspaces import KernelMemory
from anybatch.planner.trace.cuda_emulation import Profile
from anybatch.planner.trace.joint_rows import joint_limit
from anybatch.planner.trace.step_spec import StepSpec, built, samples_there
from anybatch.planner.trace.step_trace import StepTrace, StepTracer, trace_step, without_garbage_collection

TRACED = (2, 3)
"""Micro-batch sizes that are traced. A single sample is special: axes are squeezed, and BatchNorm refuses it."""
_FURTHER = 5
_DRAWN = (
    " torch.rand has drawn what it reads: with the probability set to 0 nothing is left out, and that step is planned."
)
Binding = Literal["tensors", "allocator", "optimizer step", "batch", "branch"]
"""The limit that a larger micro-batch would exceed; "batch" if all of the rank's samples fit at once, "branch" if the
step does something else above it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Envelopes:
    """Memory and cost of a step at any micro-batch size.

    Attributes:
        steady: every step but the first.
        first: the first step.
        verdict: "exact" if a further trace was as predicted; "quadratic" if sizes had to be fitted as quadratics.
        checked_at: the micro-batch size of that trace; the larger of the first two if nothing fits.
        profile: the device type whose allocations these are.
        costs: of the step's operations, at any micro-batch size.
        notes: remarks for the user on how this was found.
        sharded: the strategy shards the weights, and gathers them in every micro-batch.
        decisions: what the engine decides while it is built, by what it is about.
        bound: the largest size up to which the step was seen to do the same; None where no other was met.
        alone: the same of a step of one micro-batch, where that was asked for.
    """

    steady: MemoryEnvelope
    first: MemoryEnvelope
    verdict: Literal["exact", "quadratic"]
    checked_at: int
    profile: Profile
    costs: CostLine
    notes: tuple[str, ...]
    sharded: bool = False
    decisions: Mapping[str, str] = field(default_factory=dict)
    bound: int | None = None
    alone: "Envelopes | None" = None

    def peak_bytes(self, m: int) -> int:
        """Return the most that tensors hold at once, in any step.

        Args:
            m: samples of a micro-batch.
        """
        return max(self.steady.peak_bytes(m), self.first.peak_bytes(m))

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size whose tensors fit in every step; None for no limit.

        Args:
            budget_bytes: memory for tensors.
        """
        return _smaller(self.steady.largest(budget_bytes), self.first.largest(budget_bytes), self.bound)

    def largest_allocated(self, limit_bytes: int, *, expandable: bool = False) -> int | None:
        """Return the largest micro-batch size that the allocator can serve from that much; None for no limit.

        On a CPU, whose allocator keeps nothing back, it is the largest whose tensors fit.

        Args:
            limit_bytes: memory that the allocator may reserve.
            expandable: its segments grow (`expandable_segments:True`).
        """
        if self.profile == "cpu":
            return self.largest(limit_bytes)
        both = (largest_that_fits(one, limit_bytes, expandable=expandable) for one in (self.steady, self.first))
        return _smaller(*both, self.bound)

    def binding(self, size: int, usable_bytes: int, most_samples: int) -> Binding:
        """Return the limit that the next larger micro-batch size would exceed.

        Args:
            size: the micro-batch size, in samples.
            usable_bytes: memory for tensors and the allocator's rounding.
            most_samples: samples of the largest rank share.
        """
        if size >= most_samples:
            return "batch"
        if size == self.bound:
            return "branch"
        # Tensors alone would fit, so the obstacle is how the allocator rounds and fragments them.
        if self.peak_bytes(size + 1) <= usable_bytes:
            return "allocator"
        return "optimizer step" if self.at_peak(size + 1).phase == "update" else "tensors"

    def at_peak(self, m: int) -> Peak:
        """Return the moment at which tensors hold most, in any step."""
        later = self.steady.peak_bytes(m) >= self.first.peak_bytes(m)
        return (self.steady if later else self.first).at_peak(m)

    def reserved_bytes(self, m: int, *, expandable: bool = False) -> int:
        """Return the memory that the allocator reserves on a device that has enough, at a micro-batch size of `m`."""
        if self.profile == "cpu":
            return self.peak_bytes(m)
        return max(
            replay(one.trace.events, one.sizes(m), expandable=expandable, pools=one.trace.pools).peak_reserved_bytes
            for one in (self.steady, self.first)
        )


@without_garbage_collection()
def find_envelopes(spec: StepSpec, usable_bytes: int, *, most_samples: int | None = None) -> Envelopes:
    """Trace two micro-batch sizes, and a third one, the largest that seems to fit, to see whether the two tell.

    On a CPU kernels are asked what they take for themselves. If a plan fails with that, it is made without.

    Args:
        spec: the step; its model is made if it is a function.
        usable_bytes: memory for tensors and the allocator's rounding, which decides the size of the third trace.
        most_samples: samples of the largest rank share; None for no limit.

    Raises:
        CannotPlanError: the step cannot be traced, or memory does not follow from traces; says why.
    """
    ready, reason = built(spec)
    notes = [] if reason is None else [f"the model was made with its memory, as it cannot be without: {reason}"]
    found = _with_kernels(ready, usable_bytes, most_samples=most_samples, notes=notes)
    num_there = samples_there(ready, most_samples)
    if num_there is None:
        return found
    steady, first = (_with_inputs(one, num_there, spec.num_micro_batches) for one in (found.steady, found.first))
    return dataclasses.replace(found, steady=steady, first=first)


def with_alone(found: Envelopes, spec: StepSpec, usable_bytes: int, share: int) -> Envelopes:
    """Return envelopes that know a step of one micro-batch too, where a rank's share may be one.

    No gradients are there beneath the activations of such a step: it holds up to a fifth less.

    Args:
        found: of steps of several micro-batches.
        spec: the step.
        usable_bytes: memory for tensors and the allocator's rounding.
        share: samples of the largest rank share.
    """
    largest = found.largest(usable_bytes)
    near = largest is None or 2 * largest >= share
    if not near or found.sharded or joint_limit(built(spec)[0]) is not None:
        return found
    return dataclasses.replace(
        found, alone=find_envelopes(dataclasses.replace(spec, num_micro_batches=1), usable_bytes, most_samples=share)
    )


def of_tensors(envelope: MemoryEnvelope) -> MemoryEnvelope:
    """Return the envelope without what kernels take for themselves: what tensors hold, as a ledger of a run sees it.

    Args:
        envelope: of a step; on a CPU with the workspaces that its kernels were measured to take.
    """
    inside = torch.tensor([one.operation.startswith(INSIDE) for one in envelope.trace.allocations], dtype=torch.bool)
    sizes = envelope.allocated
    parts = (part.masked_fill(inside, 0) for part in (sizes.constant, sizes.slope, sizes.curvature))
    return envelope.with_sizes(Polynomials(*parts))


def _with_inputs(envelope: MemoryEnvelope, num_samples: int, num_micro_batches: int) -> MemoryEnvelope:
    """Return the envelope of a step in which the inputs of so many samples are there, not of those that were traced."""
    sizes = envelope.allocated
    is_input = torch.tensor([one.category == "inputs" for one in envelope.trace.allocations], dtype=torch.bool)
    whole = sizes.constant + sizes.slope * num_samples // num_micro_batches
    return envelope.with_sizes(
        Polynomials(torch.where(is_input, whole, sizes.constant), sizes.slope.masked_fill(is_input, 0), sizes.curvature)
    )


def _with_kernels(ready: StepSpec, usable_bytes: int, *, most_samples: int | None, notes: Sequence[str]) -> Envelopes:
    """Return the envelopes of a spec whose model is made, with what kernels take for themselves where that is known."""
    kernels = ready.kernels
    if kernels is None or ready.profile != "cpu":
        return _found(ready, usable_bytes, most_samples=most_samples, notes=notes)
    try:
        found = _found(ready, usable_bytes, most_samples=most_samples, notes=notes)
    except CannotPlanError:
        # Without workspaces in the trace they cannot be the reason, and the error stands.
        if not kernels.num_asked:
            raise
        alone = dataclasses.replace(ready, kernels=None)
        notes = [*notes, "what kernels take for themselves is not counted: it does not follow from traces"]
        return _found(alone, usable_bytes, most_samples=most_samples, notes=notes)
    return dataclasses.replace(found, notes=(*found.notes, *_kernel_notes(kernels)))


def _kernel_notes(kernels: KernelMemory) -> list[str]:
    """Return notes on the kernels that were measured."""
    notes = []
    if kernels.num_asked:
        threads = ", ".join(map(str, kernels.num_threads))
        notes.append(
            f"what kernels take for themselves is counted: {kernels.num_asked} were run on this CPU, small, "
            f"with {threads} {'thread' if threads == '1' else 'threads'}"
        )
    if kernels.too_large:
        name, per_sample = kernels.too_large[0]
        notes.append(
            f"what {len(kernels.too_large)} kernels take for themselves is not counted: asking them would take more "
            f"than {in_bytes(kernels.most_bytes)}; {name} has {in_bytes(per_sample)} a sample"
        )
    if kernels.num_refused:
        notes.append(f"what {kernels.num_refused} kernels take for themselves is not counted: they would not run small")
    return notes


def _found(ready: StepSpec, usable_bytes: int, *, most_samples: int | None, notes: Sequence[str]) -> Envelopes:
    """Return the envelopes of a spec whose model is made.

    Raises:
        CannotPlanError: the step cannot be traced, or memory does not follow from traces; says why.
    """
    low, high = TRACED
    first, recorder = _first_trace(ready, low)
    traces, recorders = {low: first}, {low: recorder, high: OperationRecorder()}
    notes = [*notes, *traces[low].notes]
    if _reads(traces[low]):
        _refuse_dependence(ready, traces[low])
        notes = [*notes, "the step reads numbers from tensors; what it holds was seen not to depend on them"]
    try:
        # The tracer stays entered: checking a third size then takes one more step instead of a new trace.
        with StepTracer(ready) as tracing:
            traces[high] = tracing.begin(high, recorders[high])
            found = _fitted(ready, traces, [recorders[m].trace() for m in TRACED], tuple(notes))
            if found.steady.peak_bytes(1) > usable_bytes:
                # Nothing fits, and a further trace of what is likely to be large would say how much more exactly.
                return dataclasses.replace(found, checked_at=high)
            most_samples = _smaller(most_samples, joint_limit(ready))
            size = _further(_smaller(found.largest(usable_bytes), most_samples), TRACED)
            if _goes_on_as_predicted(tracing, size, found.steady):
                return dataclasses.replace(found, checked_at=size)
        return _checked(ready, traces, found, usable_bytes, most_samples=most_samples)
    except CannotPlanError:
        raise
    except PlanError as error:
        message = f"cannot plan, will probe: {error}"
        raise CannotPlanError(message) from error


def _first_trace(ready: StepSpec, size: int) -> tuple[StepTrace, OperationRecorder]:
    """Return the trace of a step at a micro-batch size, and what has recorded its operations."""
    recorder = OperationRecorder()
    trace = trace_step(ready, size, recorder=recorder)
    if trace.sharded:
        # The first time torch works out, with tensors of whole size, how each operation on shards is sharded.
        recorder = OperationRecorder()
        trace = trace_step(ready, size, recorder=recorder)
    return trace, recorder


def _fitted(
    spec: StepSpec, traces: dict[int, StepTrace], costs: Sequence[CostTrace], notes: tuple[str, ...]
) -> Envelopes:
    """Return the envelopes through the first two traces.

    Raises:
        PlanError: the two did not do the same.
    """
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


def _goes_on_as_predicted(tracing: StepTracer, size: int, envelope: MemoryEnvelope) -> bool:
    """Return whether one step more, at another size, holds what an envelope says, allocation by allocation.

    Half of a trace from the beginning, and where it is otherwise that is still to be made.
    """
    try:
        return check(envelope, tracing.next_step(size), size).verdict == "exact"
    except PlanError:
        return False


def _checked(
    spec: StepSpec, traces: dict[int, StepTrace], found: Envelopes, usable_bytes: int, *, most_samples: int | None
) -> Envelopes:
    """Return envelopes that a trace from the beginning has not contradicted: quadratics, where lines are not enough.

    Raises:
        PlanError: memory is neither linear nor quadratic in the size.
    """
    for _ in range(3):  # affine, quadratic, and once more at what the quadratic says
        size = _further(_smaller(found.largest(usable_bytes), most_samples), tuple(traces))
        if not _same_at(spec, size, traces, found):
            bound = _bound(spec, size, traces, found)
            found = dataclasses.replace(found, bound=bound, notes=(*found.notes, _of_branch(bound, size)))
            size = bound
        if size in found.steady.traced:  # the bound lies right above what was traced first
            return dataclasses.replace(found, checked_at=size)
        steady = check(found.steady, traces[size].steady, size)
        first = check(found.first, traces[size].first, size)
        if steady.verdict == first.verdict == "exact":
            return dataclasses.replace(found, checked_at=size)
        found = dataclasses.replace(found, steady=steady.envelope, first=first.envelope, verdict="quadratic")
    message = f"memory at micro-batch sizes {sorted(traces)} is neither linear nor quadratic in the size."
    raise PlanError(message)


def _same_at(spec: StepSpec, size: int, traces: dict[int, StepTrace], found: Envelopes) -> bool:
    """Trace another size, and return whether the step does the same there."""
    try:
        traces[size] = trace_step(spec, size)
        for envelope, trace in ((found.steady, traces[size].steady), (found.first, traces[size].first)):
            check_same_structure(envelope.trace, envelope.traced[0], in_order(trace), size)
    except PlanError:  # it does not run there, or does something else
        traces.pop(size, None)
        return False
    return True


def _bound(spec: StepSpec, above: int, traces: dict[int, StepTrace], found: Envelopes) -> int:
    """Return the largest size below one at which the step does the same, taken to do so up to there."""
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
        f"the step does something else at a micro-batch size of {size} than at {bound}: no more than {bound} is "
        "planned, and a larger size has to be tried"
    )


def _further(size: int | None, traced: tuple[int, ...]) -> int:
    """Return the size to look at: the one that will be run, unless it has been traced, or a small other one."""
    if size is not None and size > max(TRACED) and size not in traced:
        return size
    return next(other for other in range(_FURTHER, _FURTHER + len(traced) + 1) if other not in traced)


def _reads(trace: StepTrace) -> bool:
    return bool(trace.numbers_read or trace.truths_read)


def _refuse_dependence(spec: StepSpec, trace: StepTrace) -> None:
    """Refuse a step that does something else when the numbers it reads from tensors are others.

    Raises:
        CannotPlanError: with what differs.
    """
    m = TRACED[0]
    what = (
        f"cannot plan, will probe: the step reads {trace.numbers_read} numbers and {trace.truths_read} truth values "
        f"from tensors while it computes{trace.read_at}, and what it holds depends on them"
    )
    first, second = in_order(trace.steady), in_order(trace_step(spec, m, other_answers=True).steady)
    try:
        check_same_structure(first, m, second, m)
    except PlanError as error:
        message = f"{what}: with others it does other things.{_DRAWN if trace.is_drawn else ''}"
        raise CannotPlanError(message) from error
    if [one.num_bytes for one in first.allocations] != [one.num_bytes for one in second.allocations]:
        message = f"{what}: tensors have other sizes."
        raise CannotPlanError(message)


def _smaller(*sizes: int | None) -> int | None:
    """Return the smallest; None stands for no limit."""
    return min((size for size in sizes if size is not None), default=None)
