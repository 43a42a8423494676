"""Chapter 15: how much of a device's memory is kept free, and whether it is."""

import math
from dataclasses import dataclass

from anybatch.core.units import in_bytes

HEADROOM = 0.15
"""Share of the memory that is kept free. A margin for the unforeseen, such as fragmentation, not a speed-up."""
MEASURED_HEADROOM = 0.10
"""Share that is kept free of what a step was measured to take, on a device on which one has been."""


def measured_headroom(excess: float) -> float:
    """Return the headroom to plan with so that `MEASURED_HEADROOM` stays free although steps take more than planned.

    A plan of `P` bytes takes `(1 + excess) P`, so `(1 + excess) (1 - headroom) = 1 - MEASURED_HEADROOM`: 10% where
    the plan was right, and 15% where it was 5.9% too low.

    Args:
        excess: memory measured beyond the plan, as a fraction of the plan; not below 0.
    """
    return 1.0 - (1.0 - MEASURED_HEADROOM) / (1.0 + excess)


@dataclass(frozen=True, slots=True)
class Reserve:
    """The peak memory on a device, and how much that leaves.

    Attributes:
        peak_bytes: the most memory used at once.
        limit_bytes: what there is.
        headroom: share of it that is to be kept free.
    """

    peak_bytes: int
    limit_bytes: int
    headroom: float = HEADROOM

    @property
    def left(self) -> float:
        """Fraction of the memory that was never used; below 0 if more was used than there is."""
        return 1.0 - self.peak_bytes / self.limit_bytes

    @property
    def kept(self) -> bool:
        """Whether the headroom was kept free: `peak <= floor((1 - headroom) * limit)`."""
        return self.peak_bytes <= math.floor((1.0 - self.headroom) * self.limit_bytes)


def describe_reserve(reserve: Reserve) -> str:
    """Return the peak and the rest of a memory in words: `peak 10.2 of 24.0 GiB, 57% left: headroom of 15% kept`.

    Percentages are rounded down, so that at least as much was left as is said.

    Args:
        reserve: the peak and the limit, in bytes.
    """
    of = f"peak {in_bytes(reserve.peak_bytes, reserve.limit_bytes)}"
    if reserve.left < 0:
        return f"{of}: more than there is"
    state = "kept" if reserve.kept else "used up"
    return f"{of}, {math.floor(100 * reserve.left)}% left: headroom of {100 * reserve.headroom:g}% {state}"
