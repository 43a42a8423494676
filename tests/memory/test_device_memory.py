"""Memory use of a device, or of the process, is read without synchronizing the device."""

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch.memory import device_memory
from anybatch.memory.device_memory import MemoryInUse, begin_peak, limit_of, memory_in_use

CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it in a file")
def test_process_memory_follows_allocations() -> None:
    """On a CPU, memory in use is the process's: it grows with allocations, and the peak stays after they are freed."""
    before = memory_in_use(CPU)
    # Fresh pages from the system: a tensor could reuse pages that the process already holds.
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("Name:\tpython\n", None),
        ("VmRSS:\t 12 kB\n", None),
        ("VmPeak:\t  99 kB\nVmHWM:\t     30 kB\nVmRSS:\t     12 kB\n", MemoryInUse(12 * 1024, 30 * 1024)),
    ],
)
def test_status_files(text: str | None, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's kB is 1,024 bytes and the peak is the high-water mark; None if the file is missing or incomplete."""
    file = tmp_path / "status"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(device_memory, "_PROCESS", file)

    assert memory_in_use(CPU) == expected


class Card:
    """A fake torch.cuda with the counters of a device of 1,000 bytes, of which 800 may be allocated."""

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


def test_counters_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, the counters over all pools are read, and the limit is the allowed share of the device."""
    card = Card(monkeypatch)

    assert memory_in_use(torch.device("meta")) is None
    assert memory_in_use(CUDA) == MemoryInUse(300, 500, reserved_bytes=600, limit_bytes=800, num_retries=2)
    begin_peak(CPU)
    begin_peak(CUDA)
    assert card.asked == [CUDA, CUDA]
    assert limit_of(CUDA) == 800
    assert limit_of(CPU) is None


def test_a_device_that_is_not_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before CUDA is initialized the result is None, and reading does not initialize it."""
    card = Card(monkeypatch, begun=False)

    begin_peak(CUDA)

    assert memory_in_use(CUDA) is None
    assert card.asked == [CUDA]


@pytest.mark.gpu
def test_memory_of_an_accelerator() -> None:
    """On CUDA the values are torch's own, and a reset peak is the current memory."""
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
