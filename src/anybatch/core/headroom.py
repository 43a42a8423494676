"""Chapter 15: the share of a device's memory that is kept free as headroom."""

import math
from dataclasses import dataclass

from anybatch.core.units import in_bytes

HEADROOM = 0.15
"""Share of the memory that is kept free: a margin for unplanned use such as fragmentation, not a speed-up."""
MEASURED_HEADROOM = 0.10
"""Share kept free beyond the measured memory of a step, once a step has been measured on the device."""


def measured_headroom(excess: float) -> float:
    """Return the headroom to plan with so that `MEASURED_HEADROOM` stays free if steps exceed the plan.

    A plan of `P` bytes takes `(1 + excess) P`, so `(1 + excess) (1 - headroom) = 1 - MEASURED_HEADROOM`: 10% if the
    plan was right, and 15% if it was 5.9% too low.
    """
    return 1.0 - (1.0 - MEASURED_HEADROOM) / (1.0 + excess)


@dataclass(frozen=True, slots=True)
class Reserve:
    """The peak memory on a device, and the rest.

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
    """Return the peak and the rest of a memory in words: `peak 10.2 of 24.0 GiB, 57% left: headroom of 15% kept`.

    Percentages are rounded down, so that the rest is never overstated.
    """
    of = f"peak {in_bytes(reserve.peak_bytes, reserve.limit_bytes)}"
    if reserve.left < 0:
        return f"{of}: more than there is"
    state = "kept" if reserve.kept else "used up"
    return f"{of}, {math.floor(100 * reserve.left)}% left: headroom of {100 * reserve.headroom:g}% {state}"
