"""The memory budget of a training step on a device."""

from dataclasses import dataclass
from typing import Final

from anybatch.core.geometry import checked_int, require
from anybatch.core.units import HEADROOM, in_bytes
from anybatch.errors import UserError
from anybatch.planner.devices import Device, parse_budget

CONTEXT_BYTES: Final = 500 * 2**20
"""A CUDA context with its kernels: reports say 287 MB with lazy loading and 667 MB without (pytorch issue 86509).
We measured 837 MiB on an H200 with torch 2.11 and CUDA 13. The headroom covers the difference, and
`anybatch plan --verify` measures it.
"""
COMMUNICATOR_BYTES: Final = 688 * 10**6
"""An NCCL communicator over more than two ranks, on A100s (NCCL issue 964). Like the context, it is outside of torch's
allocator."""
WORKSPACE_BYTES: Final = 32 * 2**20
"""cuBLAS's workspace on Hopper; 8.1 MiB on older devices. It comes from torch's allocator and is never freed.
Forward and backward run in separate threads, so an H200 used two workspaces, and 1 MiB for cuBLASLt: the headroom
covers the difference.
"""
DEFAULT_REASON: Final = "the default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A device's memory, and the part of it available to tensors."""

    total_bytes: int  # all of the device's memory
    device: Device | None  # the device, if it was given by name
    headroom: float  # fraction of the memory to leave free, from 0 to 1
    outside_bytes: int  # memory outside of torch's allocator, for context and communicators
    workspace_bytes: int  # memory of libraries inside torch's allocator
    why: str = DEFAULT_REASON  # the reason for this headroom, as printed in plans
    notes: tuple[str, ...] = ()

    @property
    def overhead_bytes(self) -> int:
        """Memory of the context and of libraries."""
        return self.outside_bytes + self.workspace_bytes

    @property
    def usable_bytes(self) -> int:
        """The bytes available to tensors; negative if overheads exceed the memory."""
        return int(self.total_bytes * (1.0 - self.headroom)) - self.overhead_bytes

    def __str__(self) -> str:
        """Return the device's name and memory."""
        size = in_bytes(self.total_bytes)
        return size if self.device is None else f"{self.device.name} ({size})"


def budget_of(device: str | int | Device, *, world_size: int = 1, headroom: float | None = None) -> Budget:
    """Return the budget of a device; an unknown device is refused."""
    why = DEFAULT_REASON if headroom is None else "as requested"
    headroom = HEADROOM if headroom is None else headroom
    if isinstance(headroom, bool) or not 0.0 <= headroom < 1.0:
        message = f"{headroom=} must be the fraction of memory to keep free, from 0 to below 1: 0.15 keeps 15%."
        raise UserError(message)
    # A CPU budget is enforced by counting tensors, without a context or cached memory.
    on_cpu = isinstance(device, str) and device.startswith("cpu:")
    known: Device | None = None
    if isinstance(device, int):
        total_bytes = checked_int("device", device)
    elif isinstance(device, Device):
        total_bytes, known = device.memory_bytes, device
    else:
        require(isinstance(device, str), "device", device, "a name, a size such as '24GiB', bytes, or a Device")
        total_bytes, known = parse_budget(device.removeprefix("cpu:"))
    notes: tuple[str, ...] = ()
    if known is not None and known.autocast == "fp16":
        notes = (f"{known.name} has fp16 units but no bf16 units: bf16 products run at fp32 speed",)
    communicators = COMMUNICATOR_BYTES if world_size > 1 else 0
    return Budget(
        total_bytes=total_bytes,
        device=known,
        headroom=headroom,
        outside_bytes=0 if on_cpu else CONTEXT_BYTES + communicators,
        workspace_bytes=0 if on_cpu else WORKSPACE_BYTES,
        why=why,
        notes=notes,
    )
