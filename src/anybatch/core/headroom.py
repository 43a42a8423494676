"""Chapter 15: the share of a device's memory that is kept free as headroom."""

import math
from dataclasses import dataclass

from anybatch.core.units import in_bytes

HEADROOM = 0.15
"""Share of the memory that is kept free, as a margin for unplanned use such as fragmentation."""
MEASURED_HEADROOM = 0.10
"""Share that is kept free once a step has been measured on the device."""


def measured_headroom(excess: float) -> float:
    """Return the headroom to plan with so that `MEASURED_HEADROOM` stays free if steps exceed the plan.

    A step with a plan of `P` bytes takes `(1 + excess) P`, so `(1 + excess) (1 - headroom) = 1 - MEASURED_HEADROOM`.
    The headroom is 10% if the plan was correct, and 15% if the step took 5.9% more.
    """
    return 1.0 - (1.0 - MEASURED_HEADROOM) / (1.0 + excess)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory that a peak leaves free on a device.

    Attributes:
        peak_bytes: peak memory in use.
        limit_bytes: memory of the device.
        headroom: share of it to keep free.
    """

    peak_bytes: int
    limit_bytes: int
    headroom: float = HEADROOM

    @property
    def left(self) -> float:
        """Fraction of the memory that was never used; below 0 if the peak exceeds the limit."""
        return 1.0 - self.peak_bytes / self.limit_bytes

    @property
    def kept(self) -> bool:
        """Whether the headroom was kept free: `peak <= floor((1 - headroom) * limit)`."""
        return self.peak_bytes <= math.floor((1.0 - self.headroom) * self.limit_bytes)


def describe_reserve(reserve: Reserve) -> str:
    """Return the peak and the free memory as text: `peak 10.2 of 24.0 GiB, 57% left: headroom of 15% kept`.

    Percentages are rounded down, so that free memory is never overstated.
    """
    of = f"peak {in_bytes(reserve.peak_bytes, reserve.limit_bytes)}"
    if reserve.left < 0:
        return f"{of}: more than there is"
    state = "kept" if reserve.kept else "used up"
    return f"{of}, {math.floor(100 * reserve.left)}% left: headroom of {100 * reserve.headroom:g}% {state}"
