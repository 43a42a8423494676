"""Each step reports the memory of the rank's device to observers, and warns once when the headroom is used up."""

import sys

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, MemoryRecord, Observer, Record
from anybatch.engine import notifier
from anybatch.memory.device_memory import MemoryInUse
from tests.engine.cases import InMemory, vectors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the memory of a process")

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


def test_used_up_headroom_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peak above 85% of the limit is a warning with both values; later ones cause none."""
    peaks = iter([85 * GIB, 86 * GIB, 99 * GIB])
    held = {"allocated_bytes": 10, "reserved_bytes": 90 * GIB, "limit_bytes": 100 * GIB}
    monkeypatch.setattr(notifier, "memory_in_use", lambda _: MemoryInUse(peak_bytes=next(peaks), **held))
    notebook = Notebook()
    with make_engine(notebook) as engine:
        for _ in range(3):
            engine.step(InMemory(vectors(11)))

    (warning,) = notebook.warnings()
    assert (warning.step, warning.level) == (1, "warning")
    assert warning.message == "memory: peak 86.0 of 100 GiB, 14% left: headroom of 15% used up"
    assert "micro_batch_size" in str(warning.remedy)
