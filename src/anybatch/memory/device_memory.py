"""This process's memory on a device, read without waiting for the device. The only module that reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PROCESS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory in use.

    Attributes:
        allocated_bytes: on a CUDA device memory of tensors, on a CPU the resident memory of the process, code included.
        peak_bytes: its peak: on a CUDA device since `begin_peak`, on a CPU since the process began.
        reserved_bytes: memory that the allocator has reserved on the device; None on a CPU.
        limit_bytes: memory that the process may allocate; None for no limit.
        num_retries: number of times the allocator has emptied its cache to find room, since it began.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    num_retries: int = 0


def memory_in_use(device: torch.device) -> MemoryInUse | None:
    """Return the memory in use on a CUDA device, or by this process on a CPU; None if the system does not report it.

    A CUDA device is not queried, and not waited for: torch's allocator keeps its own counters on the host.
    """
    if device.type == "cuda":
        return _of_cuda(device)
    return _of_process() if device.type == "cpu" else None


def begin_peak(device: torch.device) -> None:
    """Reset the peak, like `torch.cuda.reset_peak_memory_stats`. Does nothing on a CPU."""
    # Before CUDA is initialised no allocator exists to be reset.
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def limit_of(device: torch.device) -> int | None:
    """Return the bytes that this process may allocate on a CUDA device; None on other devices."""
    if device.type != "cuda":
        return None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))


def driver_bytes(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device in use by its driver's count, as in nvidia-smi; None on other devices."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes)


def outside_bytes(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device in use outside of torch's allocator: contexts, communicators, other programs.

    None on other devices.
    """
    used_bytes = driver_bytes(device)
    return None if used_bytes is None else used_bytes - torch.cuda.memory_reserved(device)


def _of_cuda(device: torch.device) -> MemoryInUse | None:
    counters: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    if not counters:  # CUDA is not initialised
        return None
    return MemoryInUse(
        allocated_bytes=counters["allocated_bytes"]["all"]["current"],
        peak_bytes=counters["allocated_bytes"]["all"]["peak"],
        reserved_bytes=counters["reserved_bytes"]["all"]["current"],
        limit_bytes=limit_of(device),
        num_retries=counters["num_alloc_retries"],
    )


def _of_process() -> MemoryInUse | None:
    """Return the kernel's counts; `ru_maxrss` would include the parent program."""
    try:
        text = _PROCESS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return None
    found = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:")))
    try:
        resident, peak = _in_bytes(found["VmRSS"]), _in_bytes(found["VmHWM"])
    except KeyError:  # hidden by the kernel, as in some sandboxes
        return None
    # The kernel's two counts differ by some pages.
    return MemoryInUse(allocated_bytes=resident, peak_bytes=max(resident, peak))


def _in_bytes(text: str) -> int:
    """Return the bytes of a text such as `   1234 kB`."""
    return int(text.split(maxsplit=1)[0]) * 1024
