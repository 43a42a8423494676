"""Memory of a training step, allocation by allocation, at every micro-batch size.

The size of an allocation is `a + b m` in the micro-batch size `m`. So two traces give every size, and the memory in use
after event `t` is linear too, `A_t + B_t m`. The peak is the envelope of these lines:

    peak(m) = max over t of (A_t + B_t m)

This is exact, but not linear: at small `m` the peak is in the optimizer step, at large `m` in the loss or a layer's
backward. So a line through two peaks is off by up to 91%. The memory of a loss over all pairs of samples is quadratic,
`a + b m + c m (m - 1) / 2`, and takes a third trace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from anybatch.errors import PlanError

Category = Literal["weights", "buffers", "inputs", "gradients", "optimizer", "activations", "temporaries"]
"""Purpose of memory. Activations are made in a forward and kept for its backward; temporaries are the rest."""

Phase = Literal["setup", "forward", "backward", "reduce", "clip", "update"]
"""Phase of an allocation."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One piece of memory, from its allocation to its free."""

    num_bytes: int
    category: Category
    phase: Phase
    operation: str  # the operation that allocated it, such as `aten.addmm.default`; empty for older memory
    pool: int = 0  # number of the stream whose pool it comes from: the model computes in 0


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """All allocations and frees of one run of a program, in order."""

    allocations: tuple[Allocation, ...]  # every piece, in allocation order
    events: tuple[int, ...]  # `n` when allocation number `n - 1` is made, `-n` when it is freed
    marks: tuple[tuple[int, str], ...] = ()  # (number of events before it, name) of a mark between two events, in order

    @property
    def pools(self) -> tuple[int, ...]:
        """The pool of each allocation."""
        return tuple(one.pool for one in self.allocations)

    @property
    def peak_bytes(self) -> int:
        """Return the peak of memory in use."""
        # A free has no size: it subtracts the size of its allocation.
        held = peak = 0
        for event in self.events:
            num_bytes = self.allocations[abs(event) - 1].num_bytes
            held += num_bytes if event > 0 else -num_bytes
            peak = max(peak, held)
        return peak


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the peak."""

    num_bytes: int
    by_category: Mapping[Category, int]  # the same by category, with all categories
    phase: Phase  # phase of the last allocation
    operation: str
    event_index: int
    mark: str  # the last mark before it; empty before the first


@dataclass(frozen=True, slots=True, eq=False)
class Polynomials:
    """Many functions `constant + slope m + curvature m (m - 1) / 2`, one per entry.

    In this basis every polynomial with integer values has integer coefficients, so that nothing is ever rounded.
    """

    constant: Int64[torch.Tensor, " entry"]
    slope: Int64[torch.Tensor, " entry"]
    curvature: Int64[torch.Tensor, " entry"]

    def at(self, m: int) -> Int64[torch.Tensor, " entry"]:
        """Return every function's value at `m`."""
        # m (m - 1) is even, so the division is exact.
        return self.constant + self.slope * m + self.curvature * (m * (m - 1) // 2)

    def running_sums(self, signs: Int64[torch.Tensor, " event"], which: Int64[torch.Tensor, " event"]) -> "Polynomials":
        """Return, after each event, the sum of the functions added (sign 1) and removed (sign -1) so far.

        `which` is the index of each event's function.
        """
        # Polynomials are added by their coefficients, so one pass covers every micro-batch size.
        parts = (self.constant, self.slope, self.curvature)
        return Polynomials(*((signs * part[which]).cumsum(0) for part in parts))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryEnvelope:
    """Memory of a step at any micro-batch size. Made by `fit` and `fit_quadratic`."""

    trace: MemoryTrace  # the first trace; only its sizes belong to one micro-batch size
    allocated: Polynomials  # the size of each allocation
    held: Polynomials  # bytes in use after each event
    traced: tuple[int, ...]  # the micro-batch sizes of its traces

    @property
    def is_affine(self) -> bool:
        """Return whether every size is `a + b m`."""
        return not bool(self.allocated.curvature.any())

    def sizes(self, m: int) -> tuple[int, ...]:
        """Return the bytes of each allocation at micro-batch size `m`."""
        return tuple(self.allocated.at(m).tolist())

    def with_sizes(self, sizes: Polynomials) -> "MemoryEnvelope":
        """Return the envelope of the same events with other allocation sizes, to predict the effect of a change."""
        return _envelope(self.trace, sizes, self.traced)

    def peak_bytes(self, m: int) -> int:
        """Return the peak of memory in use at micro-batch size `m`: the maximum over all moments."""
        held = self.held.at(m)
        return max(0, int(held.max())) if len(held) else 0

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size up to which every size needs at most `budget_bytes` for tensors.

        0 if not even one sample fits, None if memory does not grow with the micro-batch size. Each moment is a convex
        function of `m`, so the sizes that fit are an interval: the search doubles until one does not fit, then bisects.
        """
        if self.peak_bytes(1) > budget_bytes:
            return 0
        # Frees cancel allocations in the running sums, so these have to grow, not single sizes.
        if not bool(((self.held.slope > 0) | (self.held.curvature > 0)).any()):
            return None
        fits, too_large = 1, 2
        while self.peak_bytes(too_large) <= budget_bytes:
            fits, too_large = too_large, 2 * too_large
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            if self.peak_bytes(middle) <= budget_bytes:
                fits = middle
            else:
                too_large = middle
        return fits

    def at_peak(self, m: int) -> Peak:
        """Return the first moment of the peak at micro-batch size `m`, and the memory in use then."""
        if not self.trace.events:
            message = "the trace is empty: nothing was allocated while the ledger was entered."
            raise PlanError(message)
        held = self.held.at(m)
        # argmax returns the first of several equal moments, so the answer does not depend on the end of the trace.
        index = int(held.argmax())
        last = self.trace.allocations[abs(self.trace.events[index]) - 1]
        sizes = self.sizes(m)
        by_category = dict.fromkeys(get_args(Category), 0)
        for event in self.trace.events[: index + 1]:
            number = abs(event) - 1
            by_category[self.trace.allocations[number].category] += sizes[number] if event > 0 else -sizes[number]
        before = [name for position, name in self.trace.marks if position <= index]
        mark = before[-1] if before else ""
        return Peak(int(held[index]), by_category, last.phase, last.operation, index, mark)

    def at(self, m: int) -> MemoryTrace:
        """Return the trace for micro-batch size `m`."""
        rows = zip(self.trace.allocations, self.sizes(m), strict=True)
        resized = tuple(replace(one, num_bytes=size) for one, size in rows)
        return MemoryTrace(resized, self.trace.events, self.trace.marks)


def fit(trace_a: MemoryTrace, m_a: int, trace_b: MemoryTrace, m_b: int) -> MemoryEnvelope:
    """Return the envelope through two traces of the same program, at micro-batch sizes `m_a` and `m_b`, at least 1.

    Avoid size 1: programs treat a single sample differently (squeezed axes, broadcasting). Raises a `PlanError` if the
    traces have different operations, or a size does not grow by whole bytes.
    """
    _check_different((m_a, m_b))
    first, second = in_order(trace_a), in_order(trace_b)
    check_same_structure(first, m_a, second, m_b)
    s_a, s_b = _sizes(first), _sizes(second)
    # Integer slopes keep predictions exact; a remainder means that a size is rounded or depends on the data.
    slope = _divided(s_b - s_a, m_b - m_a, first, (m_a, m_b))
    sizes = Polynomials(s_a - slope * m_a, slope, torch.zeros_like(slope))
    return _envelope(first, sizes, (m_a, m_b))


def fit_quadratic(traces: Sequence[tuple[MemoryTrace, int]]) -> MemoryEnvelope:
    """Return the envelope through three pairs (trace, micro-batch size): sizes may be quadratic.

    Any three points fit a quadratic: only a fourth trace can show whether it is correct.
    """
    sizes_m = tuple(m for _, m in traces)
    _check_different(sizes_m)
    (first, m_a), (second, m_b), (third, m_c) = ((in_order(trace), m) for trace, m in traces)
    check_same_structure(first, m_a, second, m_b)
    check_same_structure(first, m_a, third, m_c)
    s_a, s_b, s_c = _sizes(first), _sizes(second), _sizes(third)
    # Twice the second divided difference: the curvature in the basis 1, m, m (m - 1) / 2.
    rise = (s_c - s_b) * (m_b - m_a) - (s_b - s_a) * (m_c - m_b)
    curvature = _divided(2 * rise, (m_c - m_b) * (m_b - m_a) * (m_c - m_a), first, sizes_m)
    pairs_a, pairs_b = (m * (m - 1) // 2 for m in (m_a, m_b))
    slope = _divided((s_b - s_a) - curvature * (pairs_b - pairs_a), m_b - m_a, first, sizes_m)
    found = _envelope(first, Polynomials(s_a - slope * m_a - curvature * pairs_a, slope, curvature), sizes_m)
    # `largest` searches an interval, which needs convex functions.
    if bool((found.held.curvature < 0).any()):
        message = (
            f"memory grows ever more slowly with the micro-batch size (traced at {_listed(sizes_m)}): "
            "no polynomial gives its size at others. Let the engine try sizes instead of planning them."
        )
        raise PlanError(message)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class EnvelopeCheck:
    """Comparison of an envelope with one more trace."""

    verdict: Literal["exact", "quadratic"]  # "exact" if every size was as predicted
    envelope: MemoryEnvelope  # the envelope to use from now on
    predicted_bytes: int  # the peak that the envelope predicted
    found_bytes: int  # the peak of the trace


def check(envelope: MemoryEnvelope, trace: MemoryTrace, m: int) -> EnvelopeCheck:
    """Compare an envelope with another trace of the same step at a new micro-batch size `m`.

    If sizes differ from an affine envelope, a quadratic is fitted through all three; check it with a fourth size.

    Raises:
        PlanError: the trace ran different operations, or its sizes do not fit the quadratic either.
    """
    found = in_order(trace)
    predicted = envelope.peak_bytes(m)
    check_same_structure(envelope.trace, envelope.traced[0], found, m)
    sizes = envelope.sizes(m)
    differing = [number for number, one in enumerate(found.allocations) if one.num_bytes != sizes[number]]
    if not differing:
        return EnvelopeCheck("exact", envelope, predicted, found.peak_bytes)
    if len(envelope.traced) > 2:  # noqa: PLR2004 (already a quadratic)
        one = found.allocations[differing[0]]
        message = (
            f"{len(differing)} of {len(sizes)} sizes at micro-batch size {m} do not follow the quadratic, first "
            f"{one.operation or 'memory from before'} ({one.phase}): {sizes[differing[0]]:,} bytes were expected, "
            f"it took {one.num_bytes:,}. Let the engine try sizes instead of planning them."
        )
        raise PlanError(message)
    # The envelope reproduces its own traces exactly, so they need not be stored.
    earlier = [(envelope.at(traced), traced) for traced in envelope.traced]
    return EnvelopeCheck("quadratic", fit_quadratic([*earlier, (trace, m)]), predicted, found.peak_bytes)


def in_order(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace with consecutive frees, between two allocations or marks, sorted by number.

    Caches are emptied in the order of pointers, which differs from run to run; no peak depends on it.
    """
    ends = {position for position, _ in trace.marks}
    events: list[int] = []
    freed: list[int] = []
    for position, event in enumerate(trace.events):
        if event > 0 or position in ends:
            # Descending, because frees are negative: the earliest allocation first.
            events += sorted(freed, reverse=True)
            freed = []
        (events if event > 0 else freed).append(event)
    return MemoryTrace(trace.allocations, (*events, *sorted(freed, reverse=True)), trace.marks)


def check_same_structure(trace_a: MemoryTrace, m_a: int, trace_b: MemoryTrace, m_b: int) -> None:
    """Raise a `PlanError` for two traces (at micro-batch sizes `m_a` and `m_b`) that differ in more than sizes."""
    # The first difference shows the cause; compare lengths afterwards, since they differ as its consequence.
    for position, (event_a, event_b) in enumerate(zip(trace_a.events, trace_b.events, strict=False)):
        what_a, what_b = _description(trace_a, event_a), _description(trace_b, event_b)
        if event_a != event_b or what_a != what_b:
            message = (
                f"a step at micro-batch size {m_a} and one at {m_b} do different things, so memory at other sizes "
                f"does not follow from them: event {position} is {what_a} in one and {what_b} in the other. "
                "Let the engine try sizes instead of planning them, or remove the dependence on the data."
            )
            raise PlanError(message)
    if len(trace_a.events) != len(trace_b.events):
        shorter = min(len(trace_a.events), len(trace_b.events))
        longer = trace_a if len(trace_a.events) > shorter else trace_b
        message = (
            f"a step at micro-batch size {m_a} has {len(trace_a.events)} events, one at {m_b} has "
            f"{len(trace_b.events)}; the first that only one of them has is "
            f"{_description(longer, longer.events[shorter])}. Let the engine try sizes instead of planning them."
        )
        raise PlanError(message)


def _description(trace: MemoryTrace, event: int) -> str:
    one = trace.allocations[abs(event) - 1]
    what = one.operation or f"memory from before ({one.category})"
    return f"{what} in {one.phase}" if event > 0 else f"the end of what {what} took in {one.phase}"


def _envelope(trace: MemoryTrace, sizes: Polynomials, traced: tuple[int, ...]) -> MemoryEnvelope:
    return MemoryEnvelope(trace, sizes, sizes.running_sums(*_signs_and_numbers(trace.events)), traced)


def _signs_and_numbers(
    events: tuple[int, ...],
) -> tuple[Int64[torch.Tensor, " event"], Int64[torch.Tensor, " event"]]:
    """Return the sign of each event, 1 for an allocation and -1 for a free, and the number of the allocation."""
    all_events = torch.tensor(events, dtype=torch.int64)
    return all_events.sign(), all_events.abs() - 1


def _sizes(trace: MemoryTrace) -> Int64[torch.Tensor, " allocation"]:
    return torch.tensor([one.num_bytes for one in trace.allocations], dtype=torch.int64)


def _divided(
    numerators: Int64[torch.Tensor, " allocation"], denominator: int, trace: MemoryTrace, traced: Sequence[int]
) -> Int64[torch.Tensor, " allocation"]:
    """Return the quotients, which have to be integers."""
    remainders = numerators % denominator
    if bool(remainders.any()):
        one = trace.allocations[int(remainders.ne(0).nonzero()[0])]
        message = (
            f"the size of {one.operation or 'memory from before'} ({one.phase}) does not grow by whole bytes "
            f"with the micro-batch size (traced at {_listed(traced)}), so it is rounded up somewhere, or depends on "
            "the data. Let the engine try sizes instead of planning them."
        )
        raise PlanError(message)
    return numerators.div(denominator, rounding_mode="floor")


def _check_different(sizes: tuple[int, ...]) -> None:
    if len(set(sizes)) < len(sizes) or min(sizes) < 1:
        message = f"traces are needed at different micro-batch sizes of at least 1, not at {_listed(sizes)}."
        raise PlanError(message)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


ORDER: tuple[Category, ...] = ("weights", "buffers", "optimizer", "gradients", "inputs", "activations", "temporaries")
"""Categories in stacking order: persistent ones first, temporary ones last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Memory at each moment, by category. A moment follows one allocation or free."""

    categories: tuple[str, ...]  # in the order of the columns, without empty ones
    held_bytes: Int[Tensor, "moment category"]
    phases: Sequence[Phase]  # phase of the step at each moment
    operations: Sequence[str]  # the operation that allocated; empty at moments of a free
    marks: Sequence[tuple[int, str]] = ()  # (number of moments before it, name) of an event between two moments

    @property
    def totals(self) -> Int[Tensor, " moment"]:
        """Bytes at each moment, over all categories."""
        return self.held_bytes.sum(1)

    @property
    def peak_moment(self) -> int:
        """The first moment of the peak."""
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        """The peak of memory in use."""
        return int(self.totals.max())

    def at(self, moment: int) -> Mapping[str, int]:
        """Return the bytes at a moment (from 0), by category."""
        return dict(zip(self.categories, self.held_bytes[moment].tolist(), strict=True))

    def mark_before(self, moment: int) -> str | None:
        """Return the name of the last mark before a moment (from 0); None without one."""
        return next((name for place, name in reversed(self.marks) if place <= moment), None)


def timeline(trace: MemoryTrace) -> MemoryTimeline:
    """Return the running total of allocations minus frees, category by category.

    Equal to walking over the events with one counter for each category. Memory from before the first operation counts
    at the first moment. A free belongs to the phase of the allocation before it.
    """
    if not trace.events:
        message = "the trace holds no events."
        raise ValueError(message)
    pieces = trace.allocations
    codes = torch.tensor([get_args(Category).index(piece.category) for piece in pieces])
    sizes = torch.tensor([piece.num_bytes for piece in pieces], dtype=torch.int64)
    events = torch.tensor(trace.events)
    numbers = events.abs() - 1
    # One row per event and one column per category turn the sum by category into a single cumulative sum.
    changes = torch.zeros(len(events), len(get_args(Category)), dtype=torch.int64)
    changes[torch.arange(len(events)), codes[numbers]] = torch.where(events > 0, sizes[numbers], -sizes[numbers])
    held = changes.cumsum(0)
    # All older memory counts at one moment, after the last of these events.
    first = _num_older_allocations(trace) - 1
    kept = [name for name in ORDER if held[:, get_args(Category).index(name)].any()]
    phases, operations = _course(trace)
    return MemoryTimeline(
        categories=tuple(kept),
        held_bytes=held[first:][:, [get_args(Category).index(name) for name in kept]],
        phases=phases[first:],
        operations=operations[first:],
        marks=tuple((max(0, place - first), name) for place, name in trace.marks),
    )


def _num_older_allocations(trace: MemoryTrace) -> int:
    """Return the number of leading events that record older memory, at least one."""
    for number, event in enumerate(trace.events):
        if event < 0 or trace.allocations[event - 1].operation:
            return max(1, number)
    return len(trace.events)


def _course(trace: MemoryTrace) -> tuple[list[Phase], list[str]]:
    """Return the phase and the operation of each event."""
    phases: list[Phase] = []
    operations: list[str] = []
    # A free has no phase: it gets the phase of the allocation before it.
    phase = trace.allocations[0].phase
    for event in trace.events:
        piece = trace.allocations[abs(event) - 1]
        if event > 0:
            phase = piece.phase
        phases.append(phase)
        operations.append(piece.operation if event > 0 else "")
    return phases, operations
