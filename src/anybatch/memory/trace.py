"""Memory of a training step, allocation by allocation, at every micro-batch size.

The size of each allocation is a linear function of the micro-batch size `m`: `a + b m`. So two traces determine all
sizes, and the memory in use after event `t` is linear too: `A_t + B_t m`. The peak is the envelope of these lines:

    peak(m) = max over t of (A_t + B_t m)

The peak itself is not linear: a line through two peaks has an error of up to 91%.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Int, Int64
from torch import Tensor

from anybatch.errors import PlanError

Category = Literal["weights", "buffers", "inputs", "gradients", "optimizer", "activations", "temporaries"]
"""Purpose of memory. Activations are allocated in a forward; temporaries are all other memory of operations."""

Phase = Literal["setup", "forward", "backward", "reduce", "clip", "update"]
"""Phase of a step in which memory is allocated."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of memory."""

    num_bytes: int
    category: Category
    phase: Phase
    operation: str  # the operation that allocated it, such as `aten.addmm.default`; empty for memory from before
    pool: int = 0  # number of the allocator's memory pool, one for each CUDA stream; 0: the model's stream


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """All allocations and frees of one run of a program, in order."""

    allocations: tuple[Allocation, ...]  # in the order in which they were made
    events: tuple[int, ...]  # `n` for the allocation with index `n - 1`, `-n` for its free
    marks: tuple[tuple[int, str], ...] = ()  # (number of events before the mark, name) of each mark, in order

    @property
    def pools(self) -> tuple[int, ...]:
        """The pool of each allocation."""
        return tuple(allocation.pool for allocation in self.allocations)

    @property
    def peak_bytes(self) -> int:
        """The peak of memory in use."""
        held = peak = 0
        for event in self.events:
            num_bytes = self.allocations[abs(event) - 1].num_bytes
            held += num_bytes if event > 0 else -num_bytes
            peak = max(peak, held)
        return peak


@dataclass(frozen=True, slots=True)
class Peak:
    """The memory in use at the peak, and the event that causes it."""

    num_bytes: int
    by_category: Mapping[Category, int]  # bytes of each category; their sum is `num_bytes`
    phase: Phase  # phase of the allocation that reaches the peak
    operation: str  # operation of this allocation
    event_index: int
    mark: str  # the last mark before the peak; empty before the first mark


@dataclass(frozen=True, slots=True, eq=False)
class Lines:
    """Linear functions `constant + slope m`, one per entry, in integers, so that nothing is rounded."""

    constant: Int64[torch.Tensor, " entry"]
    slope: Int64[torch.Tensor, " entry"]

    def at(self, m: int) -> Int64[torch.Tensor, " entry"]:
        """Return the value of each function at `m`."""
        return self.constant + self.slope * m


@dataclass(frozen=True, slots=True, eq=False)
class MemoryEnvelope:
    """Memory of a step at any micro-batch size; made by `fit`."""

    trace: MemoryTrace  # the first trace, whose events are the same at any size
    allocated: Lines  # bytes of each allocation
    held: Lines  # bytes in use after each event
    traced: tuple[int, ...]  # the micro-batch sizes of the two traces

    def sizes(self, m: int) -> tuple[int, ...]:
        """Return the bytes of each allocation at micro-batch size `m`."""
        return tuple(self.allocated.at(m).tolist())

    def with_sizes(self, sizes: Lines) -> "MemoryEnvelope":
        """Return an envelope of the same events with other allocation sizes, to predict the effect of a change."""
        events = torch.tensor(self.trace.events, dtype=torch.int64)
        signs, numbers = events.sign(), events.abs() - 1
        held = Lines((signs * sizes.constant[numbers]).cumsum(0), (signs * sizes.slope[numbers]).cumsum(0))
        return replace(self, allocated=sizes, held=held)

    def with_temporary(self, m: int, num_bytes: int) -> "MemoryEnvelope":
        """Return an envelope with an allocation added at the peak: `num_bytes` at size `m`, and in proportion."""
        trace, at, number = self.trace, self.at_peak(m).event_index + 1, len(self.trace.allocations) + 1
        temporary = replace(trace.allocations[abs(trace.events[at - 1]) - 1], category="temporaries")
        events = (*trace.events[:at], number, -number, *trace.events[at:])
        marks = tuple((position + 2 * (position >= at), name) for position, name in trace.marks)
        constant, slope = (torch.tensor([size], dtype=torch.int64) for size in (num_bytes % m, num_bytes // m))
        sizes = Lines(torch.cat([self.allocated.constant, constant]), torch.cat([self.allocated.slope, slope]))
        more = MemoryTrace((*trace.allocations, temporary), events, marks)
        return replace(self, trace=more).with_sizes(sizes)

    def peak_bytes(self, m: int) -> int:
        """Return the peak of memory in use at micro-batch size `m`: the maximum over all events."""
        held = self.held.at(m)
        return max(0, int(held.max())) if len(held) else 0

    def largest(self, budget_bytes: int) -> int | None:
        """Return the largest micro-batch size whose peak is at most `budget_bytes` (all smaller sizes fit too).

        Return 0 if one sample does not fit, and None if memory does not grow with the micro-batch size.
        """
        if self.peak_bytes(1) > budget_bytes:
            return 0
        grows = self.held.slope > 0
        if not bool(grows.any()):
            return None
        room = budget_bytes - self.held.constant[grows]
        return int(room.div(self.held.slope[grows], rounding_mode="floor").min())

    def at_peak(self, m: int) -> Peak:
        """Return the first peak at micro-batch size `m`."""
        if not self.trace.events:
            message = "the trace is empty: no tensor was allocated while memory was recorded. Record a step."
            raise PlanError(message)
        held = self.held.at(m)
        index = int(held.argmax())
        last = self.trace.allocations[abs(self.trace.events[index]) - 1]
        sizes = self.sizes(m)
        by_category = dict.fromkeys(get_args(Category), 0)
        for event in self.trace.events[: index + 1]:
            number = abs(event) - 1
            by_category[self.trace.allocations[number].category] += sizes[number] if event > 0 else -sizes[number]
        mark = next((name for position, name in reversed(self.trace.marks) if position <= index), "")
        return Peak(int(held[index]), by_category, last.phase, last.operation, index, mark)

    def at(self, m: int) -> MemoryTrace:
        """Return the trace for micro-batch size `m`."""
        resized = map(lambda one, size: replace(one, num_bytes=size), self.trace.allocations, self.sizes(m))
        return MemoryTrace(tuple(resized), self.trace.events, self.trace.marks)


def fit(trace_a: MemoryTrace, m_a: int, trace_b: MemoryTrace, m_b: int) -> MemoryEnvelope:
    """Return the envelope from two traces of the same program, at two different micro-batch sizes `m_a` and `m_b`.

    Avoid size 1: programs treat a single sample differently (squeezed axes, broadcasting). Raises a `PlanError` if the
    traces have different operations. Growth by less than a whole byte is for `check` to find.
    """
    check_same_structure(trace_a, m_a, trace_b, m_b)
    slope = (_sizes(trace_b) - _sizes(trace_a)).div(m_b - m_a, rounding_mode="floor")
    sizes = Lines(_sizes(trace_a) - slope * m_a, slope)
    return MemoryEnvelope(trace_a, sizes, sizes, (m_a, m_b)).with_sizes(sizes)


def check(envelope: MemoryEnvelope, trace: MemoryTrace, m: int) -> None:
    """Raise a `PlanError` unless an envelope predicts a third trace of the same step, at micro-batch size `m`."""
    check_same_structure(envelope.trace, envelope.traced[0], trace, m)
    differences = (_sizes(trace) != envelope.allocated.at(m)).nonzero()
    if len(differences):
        found, predicted = trace.allocations[int(differences[0])], envelope.sizes(m)[int(differences[0])]
        message = (
            f"memory does not grow linearly with the micro-batch size. With {m} samples, "
            f"{found.operation or 'earlier tensors'} ({found.phase}) took {found.num_bytes:,} bytes instead of "
            f"{predicted:,}. Let the engine try sizes instead (micro_batch_size='auto')."
        )
        raise PlanError(message)


def check_same_structure(trace_a: MemoryTrace, m_a: int, trace_b: MemoryTrace, m_b: int) -> None:
    """Raise a `PlanError` if two traces (at micro-batch sizes `m_a` and `m_b`) differ in more than sizes."""
    for number, rows in enumerate(itertools.zip_longest(_program(trace_a), _program(trace_b))):
        if rows[0] != rows[1]:
            what = " and ".join("nothing" if row is None else f"{row[0]} ({row[1]})" for row in rows)
            message = (
                f"steps with micro-batches of {m_a} and {m_b} samples run different operations, so memory at other "
                f"sizes cannot be predicted: allocation {number} is {what}. Let the engine try sizes "
                "(micro_batch_size='auto'), or remove branches that depend on the data."
            )
            raise PlanError(message)


def _program(trace: MemoryTrace) -> list[tuple[str, Phase, int]]:
    """Return operation (or category) and phase of each allocation, and the number of allocations before its free.

    The order of consecutive frees is left out, since it affects no peak.
    """
    freed, made = [0] * len(trace.allocations), 0
    for event in trace.events:
        if event > 0:
            made += 1
        else:
            freed[-event - 1] = made
    return [
        (each.operation or each.category, each.phase, at) for each, at in zip(trace.allocations, freed, strict=True)
    ]


def _sizes(trace: MemoryTrace) -> Int64[torch.Tensor, " allocation"]:
    return torch.tensor([allocation.num_bytes for allocation in trace.allocations], dtype=torch.int64)


ORDER: tuple[Category, ...] = ("weights", "buffers", "optimizer", "gradients", "inputs", "activations", "temporaries")
"""Categories in the order in which plots stack them: persistent memory first, temporary memory last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Memory in use after each allocation or free (a *moment*), by category."""

    categories: tuple[str, ...]  # the categories of the columns; empty categories have no column
    held_bytes: Int[Tensor, "moment category"]
    phases: Sequence[Phase]  # phase of the step at each moment
    operations: Sequence[str]  # operation of each allocation; empty for a free
    marks: Sequence[tuple[int, str]] = ()  # (number of moments before the mark, name) of each mark

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
        return next((name for position, name in reversed(self.marks) if position <= moment), None)


def timeline(trace: MemoryTrace) -> MemoryTimeline:
    """Return the running total of allocations minus frees, by category.

    The result equals a loop over the events with one counter for each category. The first moment contains all memory
    from before the first operation. A free belongs to the phase of the allocation before it.
    """
    if not trace.events:
        message = "the trace has no events."
        raise ValueError(message)
    codes = torch.tensor([ORDER.index(allocation.category) for allocation in trace.allocations])
    sizes = _sizes(trace)
    events = torch.tensor(trace.events)
    numbers = events.abs() - 1
    # One row per event and one column per category turn the sum by category into a single cumulative sum.
    changes = torch.zeros(len(events), len(ORDER), dtype=torch.int64)
    changes[torch.arange(len(events)), codes[numbers]] = events.sign() * sizes[numbers]
    held = changes.cumsum(0)
    first = _num_older_allocations(trace) - 1
    is_used = held.any(0)
    # A free has no phase, and gets the phase of the allocation before it.
    named = [trace.allocations[event - 1] if event > 0 else None for event in trace.events]
    phases: list[Phase] = []
    for each in named:
        phases.append(phases[-1] if each is None else each.phase)
    return MemoryTimeline(
        categories=tuple(itertools.compress(ORDER, is_used.tolist())),
        held_bytes=held[first:, is_used],
        phases=phases[first:],
        operations=["" if each is None else each.operation for each in named[first:]],
        marks=tuple((max(0, position - first), name) for position, name in trace.marks),
    )


def _num_older_allocations(trace: MemoryTrace) -> int:
    """Return the number of leading events that allocate memory from before the trace; at least one."""
    for number, event in enumerate(trace.events):
        if event < 0 or trace.allocations[event - 1].operation:
            return max(1, number)
    return len(trace.events)
