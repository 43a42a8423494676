"""The memory budget of a training step on a device, from measured steps if there are any."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from anybatch.core.geometry import checked_int, refuse_unless
from anybatch.core.units import HEADROOM, in_bytes, measured_headroom
from anybatch.errors import UserError
from anybatch.planner.devices import Device, find_device, parse_budget
from anybatch.planner.measurements import KnownDevices, MeasuredStep, full_name, subject, versions_here

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
Forward and backward run in separate threads, so an H200 used two workspaces and 1 MiB for cuBLASLt; the headroom covers
the difference.
"""
NOT_MEASURED: Final = "nothing has been measured on it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMeasurements:
    """Measured facts about a device."""

    headroom: float = HEADROOM  # share of its memory to leave free, from 0 to 1
    outside_bytes: int | None = None  # memory used outside of torch's allocator on one rank; None if not measured
    why: str = NOT_MEASURED  # the reason for this headroom, as printed in plans
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A device's memory, and the part of it available to tensors."""

    total_bytes: int  # all of the device's memory
    device: Device | None  # the device, if it was given by name
    headroom: float  # share of the memory to leave free, from 0 to 1
    outside_bytes: int  # memory outside of torch's allocator, for context and communicators
    workspace_bytes: int  # memory of libraries inside torch's allocator
    why: str = NOT_MEASURED  # the reason for this headroom, as printed in plans
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The bytes available to tensors; negative if overheads exceed the memory."""
        return int(self.total_bytes * (1.0 - self.headroom)) - self.outside_bytes - self.workspace_bytes

    def __str__(self) -> str:
        """Return the device's name and memory."""
        size = in_bytes(self.total_bytes)
        return size if self.device is None else f"{self.device.name} ({size})"


def measured_of(
    device: str | int | Device | torch.device, name: str, precision: str, known: KnownDevices
) -> DeviceMeasurements:
    """Return the measurements of a device: of this machine, by name, or by memory.

    A measured step is used if its device's name or its budget's bytes match, and the versions of torch, anybatch and
    the driver are the same, since others allocate differently. The size of a context applies to every step. If the same
    model was measured, the headroom is 10% plus the error of its plan; other models can only lower the default.

    Raises:
        UserError: the device is unknown.
    """
    steps, refused = known.steps()
    belongs, of = _belongs(device), subject(name, precision)
    mine = [step for step in steps if belongs(step)]
    versions = versions_here(on_cpu=str(device).startswith("cpu"))
    fresh = [step for step in mine if step.versions == versions]
    notes = (refused,) if refused else ()
    if not fresh:
        # Mention only the newest outdated measurement.
        return DeviceMeasurements(notes=(*notes, *(_stale(step, versions) for step in mine[-1:])))
    same = [step for step in fresh if step.subject == of]
    excess = max(step.excess for step in same or fresh)
    headroom = measured_headroom(excess) if same else min(HEADROOM, measured_headroom(excess))
    seen = [step.outside_bytes for step in fresh if step.outside_bytes is not None]
    last = (same or fresh)[-1]
    why = f"measured on {last.date} with torch {versions['torch']}"
    compared = f"{100 * excess:.1f}% more memory" if excess else "no more memory"
    note = f"{why}: headroom {100 * headroom:.0f}%; {compared} used than planned for {last.subject}"
    outside = seen[-1] if seen else None
    return DeviceMeasurements(headroom=headroom, outside_bytes=outside, why=f"as {why}", notes=(*notes, note))


def catalogued(full: str) -> Device | None:
    """Return the device in the table by its driver's name; None if it is missing."""
    try:
        return None if full.startswith("cpu:") else find_device(full.partition(": ")[2])
    except UserError:
        return None


def _belongs(device: str | int | Device | torch.device) -> Callable[[MeasuredStep], bool]:
    """Return a predicate: was a step measured on this device?"""
    if isinstance(device, torch.device) or (isinstance(device, str) and device.startswith("cpu:")):
        here = full_name(device if isinstance(device, torch.device) else torch.device("cpu"))
        return lambda step: step.device == here
    total_bytes, named = (0, device) if isinstance(device, Device) else (device, None)
    if isinstance(device, str):
        total_bytes, named = parse_budget(device)
    if named is not None:
        return lambda step: catalogued(step.device) is named
    return lambda step: step.budget_bytes == total_bytes and not step.device.startswith("cpu:")


def _stale(step: MeasuredStep, versions: Mapping[str, str | None]) -> str:
    """Return a note on why a measured step is ignored."""
    changed = [(name, step.versions.get(name), now) for name, now in versions.items() if step.versions.get(name) != now]
    other = ", ".join(f"{name} {old or 'unknown'} (now {now or 'unknown'})" for name, old, now in changed)
    return f"measurements of {step.date} are ignored: they used {other or 'other versions'}"


def budget_of(
    device: str | int | Device,
    *,
    world_size: int = 1,
    headroom: float | None = None,
    measured: DeviceMeasurements | None = None,
) -> Budget:
    """Return the budget of a device.

    Raises:
        UserError: the device is unknown, or the headroom is out of range.
    """
    if headroom is not None:
        measured = DeviceMeasurements(headroom=headroom, why="as asked")
    elif measured is None:
        measured = DeviceMeasurements()
    headroom = measured.headroom
    if isinstance(headroom, bool) or not 0.0 <= headroom < 1.0:
        message = f"{headroom=} must be the share of memory to leave free, from 0 to below 1: 0.15 leaves 15%."
        raise UserError(message)
    # A CPU budget is enforced by counting tensors, without a context or cached memory.
    on_cpu = isinstance(device, str) and device.startswith("cpu:")
    known: Device | None = None
    if isinstance(device, int):
        total_bytes = checked_int("device", device)
    elif isinstance(device, Device):
        total_bytes, known = device.memory_bytes, device
    else:
        refuse_unless(isinstance(device, str), "device", device, "a name, a size such as '24GiB', bytes, or a Device")
        total_bytes, known = parse_budget(device.removeprefix("cpu:"))
    context_bytes = CONTEXT_BYTES if measured.outside_bytes is None else measured.outside_bytes
    # The first collective creates the communicator, so measurements of a single rank do not include it.
    communicators = COMMUNICATOR_BYTES if world_size > 1 else 0
    return Budget(
        total_bytes=total_bytes,
        device=known,
        headroom=headroom,
        outside_bytes=0 if on_cpu else context_bytes + communicators,
        workspace_bytes=0 if on_cpu else WORKSPACE_BYTES,
        why=measured.why,
        notes=(*measured.notes, *(() if known is None else _device_notes(known))),
    )


def _device_notes(device: Device) -> list[str]:
    notes = [device.note] if device.note else []
    if device.autocast == "fp16":
        notes.append(f"{device.name} has fp16 units but no bf16 units: bf16 products run at fp32 speed")
    return notes
