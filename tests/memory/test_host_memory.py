"""Host memory as reported by the system, and the decision whether a size may be doubled."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from anybatch.memory.device_memory import HostHeadroom, HostReading, device_name, read_host

MEBIBYTE = 2**20


def system(root: Path, *, available: int, resident: int, peak: int, limit: str | None = None, used: int = 0) -> Path:
    """Write fake Linux files with these sizes in MiB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available * 1024} kB\nHugePages_Total: 0\n")
    (root / "proc/self/status").write_text(f"Name:\tx\nVmHWM:\t{peak * 1024} kB\nVmRSS:\t{resident * 1024} kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used * MEBIBYTE}\n")
    return root


def test_memory_reported_by_linux(tmp_path: Path) -> None:
    """Available, resident and peak memory are in bytes; a container's tighter limit counts."""
    wide = read_host(system(tmp_path / "a", available=4000, resident=300, peak=500))
    assert wide == HostReading(4000 * MEBIBYTE, 300 * MEBIBYTE, 500 * MEBIBYTE)
    same = read_host(system(tmp_path / "b", available=4000, resident=300, peak=500, limit="max"))
    assert same == wide
    tight = read_host(
        system(tmp_path / "c", available=4000, resident=300, peak=500, limit=str(1000 * MEBIBYTE), used=400)
    )
    assert tight is not None
    assert tight.available_bytes == 600 * MEBIBYTE


GROUPS: Mapping[str, tuple[str, Mapping[str, tuple[str, int]]]] = {
    "version 2, in a container": ("0::/", {"": (str(1000 * MEBIBYTE), 400)}),
    "version 2, limited above": ("0::/a/b", {"a/b": ("max", 10), "a": (str(700 * MEBIBYTE), 100)}),
    "version 2, limited twice": ("0::/a/b", {"a/b": (str(900 * MEBIBYTE), 10), "a": (str(700 * MEBIBYTE), 100)}),
    "version 2, the host's path": ("0::/../../init", {"": (str(1000 * MEBIBYTE), 400)}),
    "version 1, in a container": ("4:memory:/docker/1f", {"memory": (str(1000 * MEBIBYTE), 400)}),
    "version 1, nested": (
        "11:cpu,cpuacct:/x\n4:memory:/a/b",
        {"memory/a/b": (str(600 * MEBIBYTE), 0), "memory": ("9223372036854771712", 0)},
    ),
    "both versions": (
        "1:name=systemd:/x\n2:hugetlb,memory:/a\n0::/x",
        {"memory/a": (str(600 * MEBIBYTE), 0), "": (str(900 * MEBIBYTE), 0)},
    ),
}
"""`/proc/self/cgroup`, and (limit, MiB used) of groups by folder; 600 MiB are available in each case."""


@pytest.mark.parametrize("name", GROUPS)
def test_limits_of_control_groups(name: str, tmp_path: Path) -> None:
    """The tightest limit of the group and its parents counts, in both cgroup versions and for every kind of path."""
    root = system(tmp_path, available=4000, resident=300, peak=500)
    of_process, groups = GROUPS[name]
    (root / "proc/self/cgroup").write_text(f"{of_process}\n")
    for folder, (limit, used) in groups.items():
        path = root / "sys/fs/cgroup" / folder
        path.mkdir(parents=True, exist_ok=True)
        names = ("limit_in_bytes", "usage_in_bytes") if folder.startswith("memory") else ("max", "current")
        for file, value in zip(names, (limit, used * MEBIBYTE), strict=True):
            (path / f"memory.{file}").write_text(f"{value}\n")

    found = read_host(root)

    assert found is not None
    assert found.available_bytes == 600 * MEBIBYTE


def test_other_systems_report_no_memory(tmp_path: Path) -> None:
    """On another system host memory is unknown, and doubling is allowed."""
    assert read_host(tmp_path) is None
    room = HostHeadroom(lambda: None)
    assert room.available_bytes is None
    assert room.may_double()


def test_doubling_needs_twice_the_growth() -> None:
    """Doubling is refused if twice the growth so far would not have fit."""
    readings = iter([HostReading(1000, 200, 300), *(HostReading(0, 200, peak) for peak in (300, 400, 700, 701))])
    room = HostHeadroom(lambda: next(readings))

    assert room.available_bytes == 1000
    assert [room.may_double() for _ in range(4)] == [True, True, True, False]


def test_shared_room() -> None:
    """Processes that share a host each get a part of its memory."""
    readings = iter([HostReading(1000, 200, 300), HostReading(0, 200, 450), HostReading(0, 200, 451)])
    room = HostHeadroom(lambda: next(readings), num_sharing=2)

    assert room.available_bytes == 500
    assert [room.may_double(), room.may_double()] == [True, False]


def test_this_machine_has_a_name() -> None:
    """The name of a CPU includes its number of compute threads."""
    assert device_name(torch.device("cpu")).endswith("1 threads")
