"""Memory of this process on a device and on its host, read without waiting for the device, and the machine's name."""

import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PROCESS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory in use."""

    allocated_bytes: int  # on a CUDA device memory of tensors
    peak_bytes: int  # its peak: on a CUDA device since `begin_peak`, on a CPU since the process began
    reserved_bytes: int | None = None  # memory that the allocator has reserved on the device; None on a CPU
    limit_bytes: int | None = None  # memory that the process may allocate; None for no limit
    num_retries: int = 0  # number of times the allocator has emptied its cache to find room, since it began


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


_UNIT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HostReading:
    """Memory of the host at one moment."""

    available_bytes: int  # memory that can still be allocated without swapping
    resident_bytes: int  # resident memory of this process
    peak_bytes: int  # its peak since the process began


def read_host(root: Path = Path("/")) -> HostReading | None:
    """Return Linux's counts of the host's memory, within the limit of a container; None if unavailable.

    `root` is the root of the file system, for tests.
    """
    try:
        machine, process = _kilobytes(root / "proc/meminfo"), _kilobytes(root / "proc/self/status")
        available = machine["MemAvailable"]
        resident, peak = process["VmRSS"], process["VmHWM"]
    except (OSError, KeyError, ValueError):
        return None
    # A container's limit may be far below the machine's free memory.
    return HostReading(min([available, *_left_in_groups(root)]), resident, peak)


class HostRoom:
    """Watches a process's memory use from now on, roughly: the system counts pages, and only keeps the peak.

    `num_sharing` is the number of processes that use the same amount at the same time.
    """

    def __init__(self, read: Callable[[], HostReading | None] = read_host, *, num_sharing: int = 1) -> None:
        self._read = read
        self._num_sharing = num_sharing
        self._start = read()

    @property
    def available_bytes(self) -> int | None:
        """Memory available to one process at the beginning; None if unknown."""
        return None if self._start is None else self._start.available_bytes // self._num_sharing

    def may_double(self) -> bool:
        """Return whether twice the peak use since the beginning would have fitted.

        True if nothing is known, and while this process's peak is from before the beginning.
        """
        now, start = self._read(), self._start
        if now is None or start is None or now.peak_bytes <= start.peak_bytes:
            return True
        taken = now.peak_bytes - start.resident_bytes
        return 2 * taken * self._num_sharing <= start.available_bytes


def device_name(device: torch.device) -> str:
    """Return a device's name; for a CPU its model, instruction set and number of threads, which determine its speed."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    model = platform.processor() or platform.machine()
    try:
        # `platform.processor()` is empty, or only the architecture, on most Linux systems.
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _kilobytes(path: Path) -> dict[str, int]:
    """Return the lines `name: number kB` of a file, in bytes."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value[:-3]) * _UNIT_BYTES
    return found


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes under each memory limit of this process's control groups.

    A limit covers all groups below it. In a container its own group may appear as the root, and the path that the
    kernel reports does not exist.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = [line.split(":", 2) for line in lines if line.count(":") > 1]
    paths = {controllers: path for _, controllers, path in fields}
    for top, names, path in (
        (root / "sys/fs/cgroup", ("memory.max", "memory.current"), paths.get("", "/")),  # version 2
        (
            root / "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), "/"),
        ),
    ):
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no such group or file, or the limit is "max"
                limit, used = (int((folder / name).read_text(encoding="utf-8")) for name in names)
                yield max(0, limit - used)
            if folder == top:
                break
