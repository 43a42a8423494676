"""Chapter 19: how much of a device's memory is kept free, and whether it is."""

import math
from dataclasses import dataclass

HEADROOM = 0.15
"""Share of the memory that is kept free. A margin for what is not foreseen, such as fragments, not a speed-up."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """The most that was held of a device's memory, and what that leaves.

    Attributes:
        peak_bytes: most that was held at once.
        limit_bytes: what there is.
        headroom: share of it that is to be kept free.
    """

    peak_bytes: int
    limit_bytes: int
    headroom: float = HEADROOM

    @property
    def left(self) -> float:
        """Share of the memory that was never held; below 0 if more was held than there is."""
        return 1.0 - self.peak_bytes / self.limit_bytes

    @property
    def kept(self) -> bool:
        """Whether the headroom was kept free: `peak <= floor((1 - headroom) * limit)`."""
        return self.peak_bytes <= math.floor((1.0 - self.headroom) * self.limit_bytes)
