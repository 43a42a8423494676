"""What a device, or the process, holds: one place asks, and it does not wait for the device."""

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.memory import device_memory
from anybatch.memory.device_memory import MemoryInUse, begin_peak, limit_of, memory_in_use
from tests.faults import sees

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it in a file")
def test_the_process_holds_what_it_has_touched() -> None:
    """On a CPU the memory in use is the process's; it grows by what is allocated, and the peak stays when it goes."""
    before = memory_in_use(CPU)
    # New pages of the system's: a tensor might get some that this process has freed and still has.
    mapped = mmap.mmap(-1, 2**26)
    mapped.write(b"\x01" * 2**26)
    during = memory_in_use(CPU)
    mapped.close()
    after = memory_in_use(CPU)

    assert before is not None
    assert during is not None
    assert after is not None
    assert during.allocated_bytes - before.allocated_bytes > 2**25
    assert during.allocated_bytes - after.allocated_bytes > 2**25
    assert after.peak_bytes - before.allocated_bytes > 2**25
    assert (after.reserved_bytes, after.limit_bytes) == (None, None)


@pytest.mark.parametrize("text", [None, "Name:\tpython\n", "VmRSS:\t 12 kB\n"])
def test_a_system_that_does_not_tell(text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file is missing, or does not hold both numbers, nothing is said."""
    file = tmp_path / "status"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(device_memory, "_PROCESS", file)

    assert memory_in_use(CPU) is None


def test_kibibytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel calls kB is 1,024 bytes, and the peak is the line of the high-water mark."""
    file = tmp_path / "status"
    file.write_text("VmPeak:\t  99 kB\nVmHWM:\t     30 kB\nVmRSS:\t     12 kB\n", encoding="utf-8")
    monkeypatch.setattr(device_memory, "_PROCESS", file)

    assert memory_in_use(CPU) == MemoryInUse(allocated_bytes=12 * 1024, peak_bytes=30 * 1024)


class Card:
    """Stands in for torch.cuda, with the counters of a device of 1,000 bytes of which 800 may be allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, begun: bool = True) -> None:
        self.asked: list[torch.device] = []
        self.counters: dict[str, Any] = {
            "allocated_bytes": {"all": {"current": 300, "peak": 500}, "small_pool": {"current": 1, "peak": 1}},
            "reserved_bytes": {"all": {"current": 600, "peak": 700}},
            "num_alloc_retries": 2,
        }
        self.begun = begun
        for name, value in {
            "memory_stats_as_nested_dict": self.stats,
            "get_device_properties": lambda _: type("Properties", (), {"total_memory": 1_000}),
            "get_per_process_memory_fraction": lambda _: 0.8,
            "is_initialized": lambda: begun,
            "reset_peak_memory_stats": self.asked.append,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def stats(self, device: torch.device) -> dict[str, Any]:
        self.asked.append(device)
        return self.counters if self.begun else {}


@sees(
    "memory report: the peak is read from what is reserved",
    "src/anybatch/memory/device_memory.py",
    'peak_bytes=counters["allocated_bytes"]["all"]["peak"]',
    'peak_bytes=counters["reserved_bytes"]["all"]["peak"]',
)
def test_counters_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device the allocator's counters over all pools are read, and the limit is the share that is allowed."""
    card = Card(monkeypatch)

    assert memory_in_use(CUDA) == MemoryInUse(300, 500, reserved_bytes=600, limit_bytes=800, num_retries=2)
    assert card.asked == [CUDA]
    assert limit_of(CUDA) == 800
    assert limit_of(CPU) is None


@sees(
    "memory report: asking begins a device",
    "src/anybatch/memory/device_memory.py",
    'if device.type == "cuda" and torch.cuda.is_initialized():',
    'if device.type == "cuda":',
)
def test_a_device_that_was_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA has been begun nothing is said, and asking does not begin it."""
    card = Card(monkeypatch, begun=False)

    begin_peak(CUDA)

    assert memory_in_use(CUDA) is None
    assert card.asked == [CUDA]


def test_only_a_device_has_a_peak_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's peak begins anew when it is told to, and a CPU has none."""
    card = Card(monkeypatch)

    begin_peak(CPU)
    begin_peak(CUDA)

    assert card.asked == [CUDA]


def test_devices_that_do_not_tell() -> None:
    """An accelerator of another kind is not taken for the process."""
    assert memory_in_use(torch.device("meta")) is None


@pytest.mark.gpu
def test_memory_of_an_accelerator() -> None:
    """On a CUDA device it is what torch itself says, and a peak that has begun anew is what is held now."""
    device = torch.device("cuda:0")
    held = torch.ones(2**20, device=device)
    torch.ones(2**22, device=device)
    begin_peak(device)
    found = memory_in_use(device)

    assert found is not None
    assert found.allocated_bytes == found.peak_bytes == torch.cuda.memory_allocated(device) >= held.nbytes
    assert found.reserved_bytes == torch.cuda.memory_reserved(device)
    assert found.limit_bytes is not None
    assert found.limit_bytes > found.peak_bytes
