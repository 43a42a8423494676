"""Memory over the course of a step, by category: the running sum of a trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Int
from torch import Tensor

from anybatch.memory.trace import Category, MemoryTrace, Phase

ORDER: tuple[Category, ...] = ("weights", "buffers", "optimizer", "gradients", "inputs", "activations", "temporaries")
"""Categories in stacking order: persistent ones first, temporary ones last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Memory at each moment, by category. A moment follows one allocation or free.

    Attributes:
        categories: in the order of the columns, without empty ones.
        held_bytes: bytes at each moment.
        phases: phase of the step at each moment.
        operations: the operation that allocated; empty at moments of a free.
        marks: (number of moments before it, name) of an event between two moments.
    """

    categories: tuple[str, ...]
    held_bytes: Int[Tensor, "moment category"]
    phases: Sequence[Phase]
    operations: Sequence[str]
    marks: Sequence[tuple[int, str]] = ()

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
