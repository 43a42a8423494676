"""Each step reports the memory of the rank's device to observers, and warns once when the headroom is used up."""

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, MemoryRecord, Observer, Record, StepRecord
from anybatch.engine import notifier
from anybatch.engine.notifier import num_bytes_of
from anybatch.memory.device_memory import MemoryInUse
from tests.engine.cases import InMemory, vectors
from tests.ranks_fixture import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")

GIB = 2**30
NUM_WEIGHTS = 5 * 6 + 6 + 6 * 4 + 4


class Notebook:
    """Keeps all records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def observe(self, record: Record, /) -> None:
        self.records.append(record)

    def memory(self) -> list[MemoryRecord]:
        return [record for record in self.records if isinstance(record, MemoryRecord)]

    def warnings(self) -> list[DiagnosisRecord]:
        return [
            record
            for record in self.records
            if isinstance(record, DiagnosisRecord) and record.code == "headroom_used_up"
        ]


class Gauge:
    """Simulates a device with given memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peaks: Iterator[int]) -> None:
        self.happened: list[str] = []
        self._peaks = peaks
        monkeypatch.setattr(notifier, "memory_in_use", self.read)
        monkeypatch.setattr(notifier, "begin_peak", lambda _: self.happened.append("begin"))

    def read(self, _: torch.device) -> MemoryInUse:
        self.happened.append("read")
        return MemoryInUse(
            allocated_bytes=10, peak_bytes=next(self._peaks), reserved_bytes=90 * GIB, limit_bytes=100 * GIB
        )


def make_engine(observer: Observer | None, dtype: torch.dtype = torch.float64, **choices: object) -> ab.Engine:
    """Return an engine over a model with 64 weights."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).to(dtype)
    return ab.Engine(
        model,
        lambda named: torch.optim.AdamW(named, lr=0.01),
        ab.mean_over_samples(
            lambda net, batch: nn.functional.cross_entropy(net(batch["x"].to(dtype)).double(), batch["y"])
        ),
        micro_batch_size=4,
        observer=observer,
        **choices,  # type: ignore[arg-type]
    )


def test_each_step_tells_it_once() -> None:
    """Each step sends one memory record with the live memory of the process, just before the step record."""
    notebook = Notebook()
    with make_engine(notebook) as engine:
        for _ in range(3):
            engine.step(InMemory(vectors(11)))

    found = notebook.memory()
    assert [record.step for record in found] == [0, 1, 2]
    for record in found:
        after = notebook.records[notebook.records.index(record) + 1]
        assert isinstance(after, StepRecord)
        assert after.step == record.step
        assert record.peak_bytes >= record.allocated_bytes > 2**24
        assert (record.reserved_bytes, record.limit_bytes) == (None, None)


def test_categories_are_sums_of_sizes() -> None:
    """Memory of weights, gradients and optimizer state follows from tensor sizes; AdamW holds two moments."""
    notebook = Notebook()
    with make_engine(notebook) as engine:
        engine.step(InMemory(vectors(11)))
        engine.step(InMemory(vectors(11)))

    sizes = dict(notebook.memory()[-1].category_bytes)
    steps = 4 * len(list(engine.model.parameters()))  # type: ignore[union-attr]
    assert sizes == {
        "weights": 8 * NUM_WEIGHTS,
        "buffers": 0,
        "gradients": 8 * NUM_WEIGHTS,
        "optimizer": 16 * NUM_WEIGHTS + steps,
    }
    assert sizes["optimizer"] == sum(
        value.nbytes for state in engine.optimizer.state.values() for value in state.values()
    )


def test_used_up_headroom_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peak above 85% of the limit is a warning with both values; later ones cause none."""
    Gauge(monkeypatch, iter([85 * GIB, 86 * GIB, 99 * GIB]))
    notebook = Notebook()
    with make_engine(notebook) as engine:
        for _ in range(3):
            engine.step(InMemory(vectors(11)))

    (warning,) = notebook.warnings()
    assert (warning.step, warning.level) == (1, "warning")
    assert warning.message == "memory: peak 86.0 of 100 GiB, 14% left: headroom of 15% used up"
    assert "micro_batch_size" in str(warning.remedy)


def gradient_bytes_held() -> tuple[int, int]:
    """Run on a rank: return the bytes of gradient buffers before the first step, and as reported by a step."""
    notebook = Notebook()
    world = ab.World.from_environment(device="cpu")
    with make_engine(notebook, world=world, strategy="all_reduce") as engine:
        before = num_bytes_of(engine.resident_tensors()["gradients"])
        engine.step(InMemory(vectors(11)))
    return before, notebook.memory()[0].category_bytes["gradients"]


def test_buffers_that_are_reduced_are_gradients(two_ranks: Ranks) -> None:
    """Under all_reduce, gradient buckets exist from the start and are counted once."""
    for before, told in two_ranks.run(gradient_bytes_held):
        assert before == told == 8 * NUM_WEIGHTS
