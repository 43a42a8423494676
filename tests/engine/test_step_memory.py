"""Each step tells what the rank's device holds, to whoever observes; and it says once that the headroom is used up."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, MemoryRecord, Observer, Record, StepRecord
from anybatch.engine.telemetry import step_memory
from anybatch.engine.update.resident_tensors import num_bytes_of
from anybatch.memory.device_memory import MemoryInUse
from tests.engine.cases import InMemory, vectors
from tests.faults import sees
from tests.ranks_fixture import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")

GIB = 2**30
NUM_WEIGHTS = 5 * 6 + 6 + 6 * 4 + 4


class Notebook:
    """Keeps what it is told."""

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
    """Stands in for a device that holds as much as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peaks: Iterator[int]) -> None:
        self.happened: list[str] = []
        self._peaks = peaks
        monkeypatch.setattr(step_memory, "memory_in_use", self.read)
        monkeypatch.setattr(step_memory, "begin_peak", lambda _: self.happened.append("begin"))

    def read(self, _: torch.device) -> MemoryInUse:
        self.happened.append("read")
        return MemoryInUse(
            allocated_bytes=10, peak_bytes=next(self._peaks), reserved_bytes=90 * GIB, limit_bytes=100 * GIB
        )


def make_engine(observer: Observer | None, dtype: torch.dtype = torch.float64, **choices: object) -> ab.Engine:
    """Return an engine over 94 weights."""
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
    """One memory record comes with each step, just before the step's own, and says what the process holds."""
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


@sees(
    "memory report: the device is asked although nobody observes",
    "src/anybatch/engine/telemetry/notifier.py",
    "if self._observer is not None and self._memory is not None:",
    "if self._memory is not None:",
)
def test_nobody_is_asked_unless_somebody_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an observer nothing is asked, and torch's peak counters are left to the user."""
    gauge = Gauge(monkeypatch, iter([]))
    with make_engine(None) as engine:
        engine.step(InMemory(vectors(11)))

    assert gauge.happened == []


@sees(
    "memory report: the peak goes on from the step before",
    "src/anybatch/engine/telemetry/notifier.py",
    "            self._memory.begin()",
    "            pass",
)
def test_the_peak_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's peak begins anew in each step and is read at its end, so each record has its own step's."""
    gauge, notebook = Gauge(monkeypatch, iter([70 * GIB, 50 * GIB])), Notebook()
    with make_engine(notebook) as engine:
        for _ in range(2):
            engine.step(InMemory(vectors(11)))

    assert gauge.happened == ["begin", "read"] * 2
    assert [record.peak_bytes for record in notebook.memory()] == [70 * GIB, 50 * GIB]


def test_categories_are_sums_of_sizes() -> None:
    """Weights, gradients and the optimizer's moments are known from their sizes: AdamW holds two of each weight."""
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


@sees(
    "memory report: master weights are forgotten",
    "src/anybatch/engine/update/resident_tensors.py",
    '"optimizer": (*beside, ',
    '"optimizer": (',
)
def test_master_weights_and_averages_are_the_optimizers() -> None:
    """Under bf16 the optimizer holds a master weight, two moments and the average in float32, beside bf16 weights."""
    notebook = Notebook()
    with make_engine(notebook, torch.bfloat16, average_decay=0.9) as engine:
        engine.step(InMemory(vectors(11)))

    sizes = notebook.memory()[-1].category_bytes
    steps = 4 * len(list(engine.model.parameters()))  # type: ignore[union-attr]
    assert sizes["weights"] == 2 * NUM_WEIGHTS
    assert sizes["gradients"] == 4 * NUM_WEIGHTS
    assert sizes["optimizer"] == 16 * NUM_WEIGHTS + steps


@sees(
    "memory report: memory that two tensors share counts twice",
    "src/anybatch/engine/update/resident_tensors.py",
    "sizes[storage_key(storage)] = storage.nbytes()",
    "sizes[id(tensor)] = storage.nbytes()",
)
def test_shared_memory_counts_once() -> None:
    """Views of one tensor are its memory, a sparse tensor is its indices and values, and an empty one is nothing."""
    whole = torch.zeros(10, dtype=torch.float64)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), check_invariants=True)

    assert num_bytes_of([whole[:3], whole[3:], whole]) == 80
    assert num_bytes_of([sparse]) == 2 * 8 + 6 * 4
    assert num_bytes_of([torch.empty(0)]) == 0


@sees(
    "memory report: the warning about headroom comes in every step",
    "src/anybatch/engine/telemetry/step_memory.py",
    "            self._has_warned = True",
    "            self._has_warned = False",
)
def test_used_up_headroom_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first peak above 85% of the limit is a warning with both values; later ones are not told again."""
    Gauge(monkeypatch, iter([85 * GIB, 86 * GIB, 99 * GIB]))
    notebook = Notebook()
    with make_engine(notebook) as engine:
        for _ in range(3):
            engine.step(InMemory(vectors(11)))

    (warning,) = notebook.warnings()
    assert (warning.step, warning.level) == (1, "warning")
    assert warning.message == "memory: peak 86.0 of 100 GiB, 14% left: headroom of 15% used up"
    assert "micro_batch_size" in str(warning.remedy)


@sees(
    "memory report: who looked in for a block goes on looking in",
    "src/anybatch/engine/telemetry/notifier.py",
    "self._observer, self._on_batch = before",
    "self._on_batch = before[1]",
    also=[
        "tests/engine/test_step_memory.py::test_an_observer_that_raises_has_gone_too",
        "tests/diagnostics/test_memory_report.py::test_a_step_that_fails_is_let_go",
    ],
)
def test_an_observer_may_come_later_and_go() -> None:
    """Who looks in for a block is told beside the engine's own observer, and not after it."""
    own, guest = Notebook(), Notebook()
    seen: list[dict[str, torch.Tensor]] = []
    with make_engine(own) as engine:
        engine.step(InMemory(vectors(11)))
        with engine.observed_by(guest, seen.append):
            engine.step(InMemory(vectors(11)))
        engine.step(InMemory(vectors(11)))

    assert [record.step for record in own.memory()] == [0, 1, 2]
    assert guest.records
    assert {getattr(record, "step", 1) for record in guest.records} == {1}
    assert sum(len(batch["x"]) for batch in seen) == len(vectors(11)["x"])


def step_and_fail(engine: ab.Engine, guest: Observer) -> None:
    """Let somebody look in for a step, and end that in an error."""
    with engine.observed_by(guest):
        engine.step(InMemory(vectors(11)))
        raise ZeroDivisionError


def test_an_observer_that_raises_has_gone_too() -> None:
    """After a block that ended in an error the engine is observed by its own observer alone, or by nobody."""
    guest = Notebook()
    with make_engine(None) as engine:
        with pytest.raises(ZeroDivisionError):
            step_and_fail(engine, guest)
        told = len(guest.records)
        engine.step(InMemory(vectors(11)))

    assert told
    assert len(guest.records) == told


@sees(
    "memory report: the engine keeps itself",
    "src/anybatch/engine/engine.py",
    """
        self._parts = build(spec, hardware, observer)
""",
    """
        self._parts = build(spec, hardware, observer)
        self._kept = self.step
""",
)
def test_an_engine_goes_when_it_is_let_go() -> None:
    """What tells memory does not keep the engine: no cycle holds its memory until the collector comes."""
    engine = make_engine(Notebook())
    engine.step(InMemory(vectors(11)))
    engine.close()
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


def gradient_bytes_held() -> tuple[int, int]:
    """Run on a rank: return the bytes of gradient buffers before the first step, and what a step tells of them."""
    notebook = Notebook()
    world = ab.World.from_environment(device="cpu")
    with make_engine(notebook, world=world, strategy="all_reduce") as engine:
        before = num_bytes_of(engine.resident_tensors()["gradients"])
        engine.step(InMemory(vectors(11)))
    return before, notebook.memory()[0].category_bytes["gradients"]


@sees(
    "memory report: buckets are no gradients",
    "src/anybatch/engine/update/resident_tensors.py",
    '"gradients": (*prepared.gradient_buffers, *gradients)',
    '"gradients": (*gradients,)',
)
def test_buffers_that_are_reduced_are_gradients(two_ranks: Ranks) -> None:
    """Under all_reduce the gradients' memory is there from the beginning, and is counted once, in the buckets."""
    for before, told in two_ranks.run(gradient_bytes_held):
        assert before == told == 8 * NUM_WEIGHTS
