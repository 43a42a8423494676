"""How much memory this process has of a device, asked without waiting for the device. The one place that asks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PROCESS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory in use.

    Attributes:
        allocated_bytes: on a CUDA device that of tensors, on a CPU the resident memory of the process, code included.
        peak_bytes: most of it at once: on a CUDA device since `begin_peak`, on a CPU since the process began.
        reserved_bytes: memory that the allocator has reserved on the device; None on a CPU.
        limit_bytes: memory that the process may allocate; None where there is no limit.
        num_retries: how often the allocator has emptied its cache to find room, since it began.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int | None = None
    limit_bytes: int | None = None
    num_retries: int = 0


def memory_in_use(device: torch.device) -> MemoryInUse | None:
    """Return the memory in use on a CUDA device, or by this process; None where the system does not report it.

    A CUDA device is not asked, and not waited for: torch's allocator keeps its own counters on the host.

    Args:
        device: a CUDA device or a CPU; None is returned for others.
    """
    if device.type == "cuda":
        return _of_cuda(device)
    return _of_process() if device.type == "cpu" else None


def begin_peak(device: torch.device) -> None:
    """Reset the peak, as `torch.cuda.reset_peak_memory_stats` does. On a CPU nothing happens.

    Args:
        device: whose peak is reset.
    """
    # Before CUDA is initialised there is no allocator whose peak could be reset.
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def limit_of(device: torch.device) -> int | None:
    """Return the bytes that this process may allocate on a CUDA device; None elsewhere.

    Args:
        device: any.
    """
    if device.type != "cuda":
        return None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))


def driver_bytes(device: torch.device) -> int | None:
    """Return the bytes of a CUDA device in use by its driver, as nvidia-smi shows them; None on other devices."""
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
    if not counters:  # CUDA has not been begun
        return None
    return MemoryInUse(
        allocated_bytes=counters["allocated_bytes"]["all"]["current"],
        peak_bytes=counters["allocated_bytes"]["all"]["peak"],
        reserved_bytes=counters["reserved_bytes"]["all"]["current"],
        limit_bytes=limit_of(device),
        num_retries=counters["num_alloc_retries"],
    )


def _of_process() -> MemoryInUse | None:
    """Return the kernel's counts; `ru_maxrss` would include the program that has started this one."""
    try:
        text = _PROCESS.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return None
    found = dict(line.split(":", 1) for line in text.splitlines() if line.startswith(("VmRSS:", "VmHWM:")))
    try:
        resident, peak = _in_bytes(found["VmRSS"]), _in_bytes(found["VmHWM"])
    except KeyError:  # a kernel that keeps it to itself, as some sandboxes' do
        return None
    # The kernel's two counts differ by some pages.
    return MemoryInUse(allocated_bytes=resident, peak_bytes=max(resident, peak))


def _in_bytes(text: str) -> int:
    """Return the bytes that `   1234 kB` says."""
    return int(text.split(maxsplit=1)[0]) * 1024
