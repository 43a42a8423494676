"""Memory of a step at any micro-batch size, extrapolated from traces of a few sizes."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from anybatch.core.tree import count_samples
from anybatch.errors import CannotPlanError, PlanError
from anybatch.memory.trace import Lines, MemoryEnvelope, Peak, check, fit
from anybatch.planner.caching_allocator import largest_that_fits, replay
from anybatch.planner.cuda_emulation import Profile
from anybatch.planner.fake_ranks import joint_limit
from anybatch.planner.step_spec import MAX_RUN_BYTES, StepSpec, built, samples_in_memory
from anybatch.planner.step_time import CostLine, fit_costs
from anybatch.planner.step_trace import StepTrace, allocated_bytes, trace_step, without_garbage_collection

TRACED = (2, 3)
"""Micro-batch sizes to trace. A single sample is special: axes may be squeezed, and BatchNorm rejects it."""
_MIN_CHECKED = 5
Binding = Literal["tensors", "allocator", "optimizer step", "batch"]
"""The limit that a larger micro-batch would exceed; "batch" if the whole rank share fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Envelopes:
    """Memory and cost of a step at any micro-batch size."""

    steady: MemoryEnvelope  # every step except the first
    first: MemoryEnvelope
    profile: Profile  # the device type of the allocations
    costs: CostLine  # costs of the step's operations, at any micro-batch size
    notes: tuple[str, ...]  # notes for the user about the traces
    sharded: bool = False  # the strategy shards the weights and gathers them in every micro-batch
    decisions: Mapping[str, str] = field(default_factory=dict)  # the engine's decisions while it was built, by topic
    workspaces: tuple[int, int] | None = None  # as in `StepSpec`; included as the last allocation
    alone: "Envelopes | None" = None  # envelopes of a step with one micro-batch, if requested

    def peak_bytes(self, m: int) -> int:
        """Return the peak of live tensors in any step, in bytes, at micro-batch size `m`."""
        return max(self.steady.peak_bytes(m), self.first.peak_bytes(m))

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size whose tensors fit in every step; None for no limit."""
        return _smaller(self.steady.largest(budget_bytes), self.first.largest(budget_bytes))

    def largest_allocated(self, limit_bytes: int, *, expandable: bool = False) -> int | None:
        """Return the largest micro-batch size for which the allocator stays within a limit; None for no limit.

        The CPU allocator does not cache, so there it is the largest size whose tensors fit.
        """
        if self.profile == "cpu":
            return self.largest(limit_bytes)
        both = (largest_that_fits(step, limit_bytes, expandable=expandable) for step in (self.steady, self.first))
        return _smaller(*both)

    def binding(self, size: int, usable_bytes: int, max_samples: int) -> Binding:
        """Return the limit that the next larger micro-batch size would exceed."""
        if size >= max_samples:
            return "batch"
        # If the tensors fit, the allocator's rounding and fragmentation are the limit.
        if self.peak_bytes(size + 1) <= usable_bytes:
            return "allocator"
        return "optimizer step" if self.at_peak(size + 1).phase == "update" else "tensors"

    def at_peak(self, m: int) -> Peak:
        """Return the moment of peak memory in any step, at micro-batch size `m`."""
        later = self.steady.peak_bytes(m) >= self.first.peak_bytes(m)
        return (self.steady if later else self.first).at_peak(m)

    def reserved_bytes(self, m: int, *, expandable: bool = False) -> int:
        """Return the memory that the allocator reserves at micro-batch size `m`, if it never has to free its cache."""
        if self.profile == "cpu":
            return self.peak_bytes(m)
        return max(
            replay(step.trace.events, step.sizes(m), expandable=expandable, pools=step.trace.pools).peak_reserved_bytes
            for step in (self.steady, self.first)
        )


@without_garbage_collection()
def find_envelopes(
    spec: StepSpec, usable_bytes: int, *, max_samples: int | None = None, max_size: int | None = None
) -> Envelopes:
    """Trace two micro-batch sizes, and check the extrapolation with a third, the largest that seems to fit."""
    ready, _ = built(spec)
    try:
        found = _checked(ready, usable_bytes, _smaller(max_samples, max_size))
    except PlanError as error:
        message = str(error) if isinstance(error, CannotPlanError) else f"cannot plan this step: {error}"
        raise CannotPlanError(message) from error
    found = _with_workspaces(
        found, ready, _smaller(found.largest(min(usable_bytes, MAX_RUN_BYTES)), max_samples, max_size)
    )
    num_in_memory = samples_in_memory(ready, max_samples)
    if num_in_memory is None:
        return found
    steady, first = (_with_inputs(step, num_in_memory, spec.num_micro_batches) for step in (found.steady, found.first))
    return dataclasses.replace(found, steady=steady, first=first)


def _with_workspaces(found: Envelopes, ready: StepSpec, size: int | None) -> Envelopes:
    """Add memory that oneDNN's kernels allocate on a CPU besides tensors, measured in a step with data if possible."""
    kernels = {one.kind if "convolution" in one.kind else one.name for one in found.costs.traces[0].operations}
    if found.profile != "cpu" or kernels.isdisjoint(("convolution", "mkldnn_rnn_layer")):
        return found
    workspaces = ready.workspaces
    if ready.make is not None and size:
        with contextlib.suppress(Exception):  # without data, the sample may be invalid
            workspaces = size, max(0, allocated_bytes(ready, size) - found.steady.peak_bytes(size))
    if workspaces is None:
        note = "workspaces of convolutions are not included: the step is too large to be measured, or needs data"
        return dataclasses.replace(found, notes=(*found.notes, note))
    steady, first = (step.with_temporary(*workspaces) for step in (found.steady, found.first))
    return dataclasses.replace(found, steady=steady, first=first, workspaces=workspaces)


def with_alone(found: Envelopes, spec: StepSpec, usable_bytes: int, share: int) -> Envelopes:
    """Add `alone`, the envelopes of a step with one micro-batch, if all samples of a rank may fit into one.

    Without gradients of an earlier micro-batch at the peak of the activations, up to a fifth of the memory is saved.
    """
    largest = found.largest(usable_bytes)
    near = largest is None or 2 * largest >= share
    if not near or found.sharded or joint_limit(built(spec)[0]) is not None:
        return found
    return dataclasses.replace(
        found, alone=find_envelopes(dataclasses.replace(spec, num_micro_batches=1), usable_bytes, max_samples=share)
    )


def _with_inputs(envelope: MemoryEnvelope, num_samples: int, num_micro_batches: int) -> MemoryEnvelope:
    """Return the envelope of a step whose inputs are `num_samples` samples instead of the traced micro-batches."""
    sizes = envelope.allocated
    is_input = torch.tensor([entry.category == "inputs" for entry in envelope.trace.allocations], dtype=torch.bool)
    whole = sizes.constant + sizes.slope * num_samples // num_micro_batches
    return envelope.with_sizes(
        Lines(torch.where(is_input, whole, sizes.constant), sizes.slope.masked_fill(is_input, 0))
    )


def _checked(ready: StepSpec, usable_bytes: int, max_size: int | None) -> Envelopes:
    """Return the envelopes, checked with a third size; from a run with data if tensors without data do not suffice."""
    low, high = TRACED
    try:
        small = trace_step(ready, low)
        if small.sharded:
            # Trace again: the first time, torch creates full-size tensors to infer how each operation is sharded.
            small = trace_step(ready, low)
        large = trace_step(ready, high)
    except CannotPlanError:
        if ready.make is None:
            raise
        with contextlib.suppress(Exception):  # the planner's, or of a model that cannot be copied
            return _measured(ready)
        return _checked(dataclasses.replace(ready, make=None), usable_bytes, max_size)
    found = _extrapolated(ready, small, low, large, high)
    # If not even one sample fits, a check would only make the amount of missing memory more exact.
    while found.steady.peak_bytes(1) <= usable_bytes:
        size = _smaller(found.largest(usable_bytes), max_size, joint_limit(ready))
        size = _MIN_CHECKED if size is None or size <= high else size
        if size == found.steady.traced[0]:
            note = f"memory does not grow linearly with the micro-batch: planned for {size} samples, and a line below"
            return dataclasses.replace(found, notes=(*found.notes, note))
        trace = trace_step(ready, size)
        try:
            check(found.steady, trace.steady, size)
            check(found.first, trace.first, size)
        except PlanError:
            found = _extrapolated(ready, trace, size, small, low)
        else:
            break
    return found


def _measured(ready: StepSpec) -> Envelopes:
    """Return the envelopes of a step that runs with data: each micro-batch has the sample once, or twice."""
    size = count_samples(ready.sample)
    low, high = TRACED if size == 1 else (size, 2 * size)
    small, large = (trace_step(ready, m, with_data=True) for m in (low, high))
    found = _extrapolated(ready, small, low, large, high)
    note = f"memory depends on data, or on a kernel of this machine: measured with your sample, of size {size}"
    return dataclasses.replace(found, notes=(*found.notes, note))


def _extrapolated(ready: StepSpec, small: StepTrace, low: int, large: StepTrace, high: int) -> Envelopes:
    """Return the envelopes from traces of two sizes, exact for the first."""
    notes = small.notes
    if small.read_at is not None:
        notes = (*notes, f"the step reads the value of a tensor{small.read_at}; planned as if it were false, 0.5 or 1")
    return Envelopes(
        steady=fit(small.steady, low, large.steady, high),
        first=fit(small.first, low, large.first, high),
        profile=ready.profile,
        costs=fit_costs(small.costs, low, large.costs, high),
        notes=notes,
        sharded=small.sharded,
        decisions=small.decisions,
    )


def _smaller(*sizes: int | None) -> int | None:
    """Return the smallest size; None means no limit."""
    return min((size for size in sizes if size is not None), default=None)
