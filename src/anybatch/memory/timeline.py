"""Memory over the course of a step, by category: a trace, added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Int
from torch import Tensor

from anybatch.memory.trace import Category, MemoryTrace, Phase

ORDER: tuple[Category, ...] = ("weights", "buffers", "optimizer", "gradients", "inputs", "activations", "temporaries")
"""Categories as they are stacked: what stays from step to step first, what comes and goes last."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryTimeline:
    """Memory at each moment, by category. A moment is after one allocation or free.

    Attributes:
        categories: in the order of the columns; those without any memory are left out.
        held_bytes: bytes at each moment.
        phases: of the step, at each moment.
        operations: the operation that allocated; empty at moments of a free.
        marks: (number of moments before it, name) of what happened between two moments.
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
        """The first moment at which most memory was in use."""
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most memory that was in use at once."""
        return int(self.totals.max())

    def at(self, moment: int) -> Mapping[str, int]:
        """Return the bytes at a moment, by category.

        Args:
            moment: index of an event, from 0.
        """
        return dict(zip(self.categories, self.held_bytes[moment].tolist(), strict=True))

    def mark_before(self, moment: int) -> str | None:
        """Return the name of the last mark before a moment; None if there is none.

        Args:
            moment: index of an event, from 0.
        """
        return next((name for place, name in reversed(self.marks) if place <= moment), None)


def timeline(trace: MemoryTrace) -> MemoryTimeline:
    """Sum up a trace: the running total of allocations less frees, category by category.

    Equal to walking over the events with one counter for each category. What was there before the first operation
    counts as there at the first moment. A release belongs to the phase of the last piece that was taken.

    Args:
        trace: sizes in bytes, at one micro-batch size.

    Raises:
        ValueError: the trace is empty.
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
    # All that was there before stands at one moment, after the last of these events.
    first = _num_there_before(trace) - 1
    kept = [name for name in ORDER if held[:, get_args(Category).index(name)].any()]
    phases, operations = _course(trace)
    return MemoryTimeline(
        categories=tuple(kept),
        held_bytes=held[first:][:, [get_args(Category).index(name) for name in kept]],
        phases=phases[first:],
        operations=operations[first:],
        marks=tuple((max(0, place - first), name) for place, name in trace.marks),
    )


def _num_there_before(trace: MemoryTrace) -> int:
    """Return the number of leading events that record memory from before, at least one."""
    for number, event in enumerate(trace.events):
        if event < 0 or trace.allocations[event - 1].operation:
            return max(1, number)
    return len(trace.events)


def _course(trace: MemoryTrace) -> tuple[list[Phase], list[str]]:
    """Return the phase and the operation of each event."""
    phases: list[Phase] = []
    operations: list[str] = []
    # A free has no phase: it is shown in that of the allocation before it.
    phase = trace.allocations[0].phase
    for event in trace.events:
        piece = trace.allocations[abs(event) - 1]
        if event > 0:
            phase = piece.phase
        phases.append(phase)
        operations.append(piece.operation if event > 0 else "")
    return phases, operations
