"""TensorBoard shows the values of the records by number of steps."""

import importlib
import itertools
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anybatch.core.records import Record
from anybatch.errors import UserError
from anybatch.events.metrics_log import TensorBoardLog
from tests.events.recorded_run import (
    Clock,
    CountingTensor,
    counting,
    end,
    evaluation,
    memory,
    micro_batch,
    start,
    step,
)
from tests.raising import raises

pytest.importorskip("tensorboard", reason="needs the package tensorboard")
Charts = Mapping[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def files_of_different_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each event file a different second.

    TensorBoard reads files of one second in text order of a process counter, in which "10" comes before "9".
    """
    seconds = itertools.count(int(time.time()))
    clock = SimpleNamespace(time=lambda: float(next(seconds)), sleep=time.sleep)
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time", clock)


def written(folder: Path, records: Iterable[Record], *, seconds: float = 1.0, **options: Any) -> None:
    """Write a run whose records are `seconds` apart."""
    clock, wall_clock = Clock(), Clock()
    wall_clock.seconds = 1_000_000.0
    with TensorBoardLog(folder, clock=clock, wall_clock=wall_clock, **options) as log:
        for record in records:
            log.observe(record)
            clock.seconds += seconds
            wall_clock.seconds += 1.0


def accumulator(folder: Path) -> Any:
    """Return TensorBoard's own reader of a folder."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    return reader.Reload()


def charts(folder: Path) -> Charts:
    """Return the scalar charts that TensorBoard shows for a folder."""
    reader = accumulator(folder)
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_charts_match_the_records(tmp_path: Path) -> None:
    """A step with its terms, groups and memory in GiB is a point at the number of finished steps; None has no chart."""
    known = {"allocated_bytes": 2**29, "reserved_bytes": 2**31, "peak_bytes": 2**30, "limit_bytes": 2**34}
    records: list[Record] = [
        start(),
        micro_batch(0, 0),
        memory(0, **known),
        step(0, 2.0, losses={"lm": 1.0, "aux": 2.0}, learning_rates=(0.5, 0.25), gradient_norm=None),
        memory(1, peak_bytes=2**30),
        step(1, torch.tensor(1.0), skipped=torch.tensor(True)),
        evaluation(2, accuracy=0.5),
        end(2),
    ]
    written(tmp_path, records)

    assert charts(tmp_path) == {
        "loss": [(1, 2.0), (2, 1.0)],
        "loss_terms/lm": [(1, 1.0)],
        "loss_terms/aux": [(1, 2.0)],
        "update_skipped": [(1, 0.0), (2, 1.0)],
        "gradient_norm": [(2, 1.25)],
        "learning_rate/group_0": [(1, 0.5)],
        "learning_rate/group_1": [(1, 0.25)],
        "learning_rate": [(2, pytest.approx(0.001))],
        "samples_per_second": [(1, pytest.approx(64 / 3)), (2, 32.0)],  # from the start, a record a second
        "memory_gib/peak": [(1, 1.0), (2, 1.0)],
        "memory_gib/allocated": [(1, 0.5), (2, pytest.approx(2**-10))],
        "memory_gib/reserved": [(1, 2.0)],
        "memory_gib/limit": [(1, 16.0)],
        "evaluation/accuracy": [(2, 0.5)],
    }


def test_discarded_steps_are_hidden(tmp_path: Path) -> None:
    """After a resume, in another process or the same, the discarded steps are hidden."""
    written(tmp_path, [start(), *(step(number, 1.0) for number in range(5)), evaluation(5, x=1.0), end(5)])
    written(tmp_path, [start(2), *(step(number, 2.0) for number in (2, 3)), start(3), step(3, 3.0)])

    assert charts(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert "evaluation/x" not in charts(tmp_path) or charts(tmp_path)["evaluation/x"] == []


def test_the_loop_does_not_wait(tmp_path: Path) -> None:
    """Tensors are read together every few seconds, and at every evaluation."""
    loss, clock, seen = counting(0.5), Clock(), []
    with TensorBoardLog(tmp_path, clock=clock, seconds_per_write=5.0) as log:
        log.observe(start())
        for number in range(12):
            clock.seconds += 1.0
            log.observe(step(number, loss))
            seen.append(CountingTensor.num_read)
        log.observe(evaluation(12, x=1.0))
        seen.append(CountingTensor.num_read)

    assert seen == [0, 0, 0, 0, 5, 5, 5, 5, 5, 10, 10, 10, 12]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TensorBoard, creating the log raises with the install command."""
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with raises(UserError, "needs_tensorboard"):
        TensorBoardLog(tmp_path)
