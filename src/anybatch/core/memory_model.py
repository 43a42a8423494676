"""Chapter 13: what a training step holds in memory, allocation by allocation."""

from dataclasses import dataclass
from typing import Literal

Category = Literal["weights", "buffers", "inputs", "gradients", "optimizer", "activations", "temporaries"]
"""What memory is held for. Activations are made in a forward and kept for its backward; temporaries are the rest."""

Phase = Literal["setup", "forward", "backward", "reduce", "clip", "update"]
"""When memory was taken."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One piece of memory, from when it was taken to when it was let go.

    Attributes:
        num_bytes: its size.
        category: what it is held for.
        phase: when it was taken.
        operation: what took it, such as `aten.addmm.default`; empty for what was there before.
    """

    num_bytes: int
    category: Category
    phase: Phase
    operation: str


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """All memory that one run of a program took and let go, in order.

    Attributes:
        allocations: every piece, in the order they were taken.
        events: `n` where allocation number `n - 1` is taken, `-n` where it is let go.
        marks: (number of events before it, name) of what happened between two events, in order.
    """

    allocations: tuple[Allocation, ...]
    events: tuple[int, ...]
    marks: tuple[tuple[int, str], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Return the most that was held at once."""
        held = peak = 0
        for event in self.events:
            num_bytes = self.allocations[abs(event) - 1].num_bytes
            held += num_bytes if event > 0 else -num_bytes
            peak = max(peak, held)
        return peak
