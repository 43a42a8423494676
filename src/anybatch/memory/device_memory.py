"""Memory of this process on a device and on its host, the ways of counting it, and the name of the device."""

import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

_PROCESS = Path("/proc/self/status")

Counted = Literal["in tensors", "allocated", "in all", "resident"]
"""Ways of counting memory; each counts more than the previous one."""

MEANINGS: Final[Mapping[Counted, str]] = MappingProxyType(
    {
        "in tensors": "the memory of all live tensors",
        "allocated": "tensors and kernel workspaces, rounded up by the allocator",
        "in all": "memory reserved by the allocator, plus the device's context and libraries",
        "resident": "the whole process, with interpreter, libraries and data",
    }
)

_BEGINS = "counted: "


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory in use on a CUDA device, or by the process on a CPU."""

    allocated_bytes: int  # on a CUDA device, memory of tensors; on a CPU, resident memory of the process
    peak_bytes: int  # peak of `allocated_bytes`: on a CUDA device since `begin_peak`, on a CPU since the process began
    reserved_bytes: int | None = None  # memory that the allocator has reserved on the device; None on a CPU
    limit_bytes: int | None = None  # memory that the process may allocate; None for no limit
    num_retries: int = 0  # how often the allocator has freed its cache to retry an allocation


def memory_in_use(device: torch.device) -> MemoryInUse | None:
    """Return the memory in use on a CUDA device, or by this process on a CPU; None if the system does not report it.

    This does not wait for a CUDA device: torch's allocator keeps its counters on the host.
    """
    if device.type == "cuda":
        return _cuda_memory(device)
    return _process_memory() if device.type == "cpu" else None


def begin_peak(device: torch.device) -> None:
    """Reset the peak, like `torch.cuda.reset_peak_memory_stats`; a no-op on a CPU."""
    # Before CUDA is initialised there is no allocator.
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)


def limit_of(device: torch.device) -> int | None:
    """Return the bytes that this process may allocate on a CUDA device; None on other devices."""
    if device.type != "cuda":
        return None
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))


def driver_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on a CUDA device as reported by the driver and nvidia-smi; None on other devices."""
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(total_bytes - free_bytes)


def outside_bytes(device: torch.device) -> int | None:
    """Return the bytes in use on a CUDA device outside of torch's allocator; None on other devices.

    They are used by contexts, communicators and other programs.
    """
    used_bytes = driver_bytes(device)
    return None if used_bytes is None else used_bytes - torch.cuda.memory_reserved(device)


def _cuda_memory(device: torch.device) -> MemoryInUse | None:
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


def _process_memory() -> MemoryInUse | None:
    """Return the memory of this process from `/proc`; `ru_maxrss` would include the parent process."""
    try:
        status = _sizes_in(_PROCESS)
        resident, peak = status["VmRSS"], status["VmHWM"]
    except (OSError, KeyError):  # not Linux, or hidden by the kernel, as in some sandboxes
        return None
    # The peak may be a few pages below the current value, because the kernel updates it separately.
    return MemoryInUse(allocated_bytes=resident, peak_bytes=max(resident, peak))


@dataclass(frozen=True, slots=True)
class HostReading:
    """Memory of the host at one moment."""

    available_bytes: int  # memory that can still be allocated without swapping
    resident_bytes: int  # resident memory of this process
    peak_bytes: int  # peak of the resident memory since the process began


def read_host(root: Path = Path("/")) -> HostReading | None:
    """Return the memory of the host as Linux reports it, within the limit of a container; None if unavailable.

    `root` is the root of the file system, for tests.
    """
    try:
        machine, process = _sizes_in(root / "proc/meminfo"), _sizes_in(root / "proc/self/status")
        available = machine["MemAvailable"]
        resident, peak = process["VmRSS"], process["VmHWM"]
    except (OSError, KeyError):
        return None
    # A container's limit may be far below the machine's free memory.
    return HostReading(min([available, *_left_in_groups(root)]), resident, peak)


class HostHeadroom:
    """The host memory that is available when this object is created, and a rough check of the peak use since then.

    `num_sharing` is the number of processes that use the same amount at the same time.
    """

    def __init__(self, read: Callable[[], HostReading | None] = read_host, *, num_sharing: int = 1) -> None:
        self._read = read
        self._num_sharing = num_sharing
        self._start = read()

    @property
    def available_bytes(self) -> int | None:
        """Memory that was available to each process at the beginning; None if unknown."""
        return None if self._start is None else self._start.available_bytes // self._num_sharing

    def may_double(self) -> bool:
        """Return whether twice the peak use since the beginning would have fitted in the available memory.

        Return True if this is unknown: for example, if the process had its peak before the beginning.
        """
        now, start = self._read(), self._start
        if now is None or start is None or now.peak_bytes <= start.peak_bytes:
            return True
        used_bytes = now.peak_bytes - start.resident_bytes
        return 2 * used_bytes * self._num_sharing <= start.available_bytes


def device_name(device: torch.device) -> str:
    """Return the name of a device; for a CPU its model, instruction set and number of threads."""
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


def _sizes_in(path: Path) -> dict[str, int]:
    """Return name -> bytes for each line `name: number kB` of a file."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    fields = [line.partition(":") for line in lines if line.endswith(" kB")]
    return {name: int(value.removesuffix(" kB")) * 1024 for name, _, value in fields}


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of each memory limit of this process's control groups.

    The limit of a group also covers the groups inside it. In a container, the container's group may be the root folder,
    so that the path that the kernel reports does not exist.
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


def counting_text(*ways: Counted) -> str:
    """Return a line that explains each way of counting: `counted: in tensors, ...`."""
    return "\n".join(f"{_BEGINS if way is ways[0] else '':{len(_BEGINS)}}{way}, {MEANINGS[way]}" for way in ways)
