"""A device in a plan: its memory and peak rates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Arithmetic = Literal["fp32", "tf32", "bf16", "fp16"]
"""Number formats of matrix products."""
Autocast = Literal["bf16", "fp16"]
"""Number formats of 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's memory and peak rates.

    Attributes:
        name: as in `anybatch plan --device`.
        memory_bytes: memory that a program can use (`total_memory` in torch), which is less than advertised.
        flops_per_second: peak of matrix products by number format; "fp32" also applies to all other operations.
        bytes_per_second: bandwidth of its memory.
        link_bytes_per_second: bandwidth to another device of the same machine, in one direction.
        source: source of the rates.
        also_called: other names used by drivers and vendors.
        note: a note for plans; may be empty.
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[Arithmetic, float]
    bytes_per_second: float
    link_bytes_per_second: float
    source: str
    also_called: tuple[str, ...] = ()
    note: str = ""

    def peak(self, arithmetic: Arithmetic) -> float:
        """Return the peak in floating-point operations per second; the fp32 peak if a format is missing."""
        return self.flops_per_second.get(arithmetic, self.flops_per_second["fp32"])

    @property
    def autocast(self) -> Autocast:
        """The 16-bit format for products: bf16, or fp16 if the device has units for fp16 only."""
        return "fp16" if "fp16" in self.flops_per_second and "bf16" not in self.flops_per_second else "bf16"
