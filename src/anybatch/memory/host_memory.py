"""This machine's name, and the memory that a process may still allocate, as far as the system reports them."""

import platform
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_UNIT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HostReading:
    """Memory of the host at one moment.

    Attributes:
        available_bytes: memory that can still be allocated without swapping.
        resident_bytes: resident memory of this process.
        peak_bytes: its peak since the process began.
    """

    available_bytes: int
    resident_bytes: int
    peak_bytes: int


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
