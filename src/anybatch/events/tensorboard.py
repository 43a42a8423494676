"""A run in TensorBoard: the numbers of each step, and events as text."""

import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    Flag,
    MemoryRecord,
    OutOfMemoryRecord,
    Record,
    Scalar,
    StartRecord,
    StepRecord,
)
from anybatch.errors import UserError
from anybatch.events.observer import ClosingObserver, Throughput, lines_of_start, message_of, read_number

Point = tuple[str, Scalar | Flag]
EventRecord = CheckpointRecord | DiagnosisRecord | OutOfMemoryRecord | EndRecord


class TensorBoardLog(ClosingObserver):
    """An observer that writes for TensorBoard. Use it in a `with`, or call `close`.

    ```bash
    pip install 'anybatch[tensorboard]'
    tensorboard --logdir runs
    ```

    Charts: `loss`, each of `loss_terms/...` if there are several, `gradient_norm`, `learning_rate` (one for each
    parameter group), `samples_per_second`, `update_skipped`, `memory_gib/peak` and other numbers of the device's
    memory, `evaluation/...`. Texts: sizes and automatic choices (`run`), and events (`happenings`). The horizontal axis
    is always the number of finished steps, including the step itself. Steps undone by a resume are hidden.

    Only rank 0 writes. Steps are buffered for some seconds, and their numbers are read from the device together, so the
    loop does not wait for the device in each step. A killed run loses the buffered steps.

    Args:
        folder: folder for TensorBoard's files, a separate one for each run; created if it is missing.
        seconds_per_write: maximum seconds that a step is buffered.
        clock: function that returns a monotonic time in seconds.
        wall_clock: function that returns the seconds since 1970, for the time of every record.

    Raises:
        UserError: TensorBoard is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seconds_per_write: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Find TensorBoard; the file is opened when the run starts."""
        # Imported now, so that a missing package is an error before the first step.
        self._make_writer = _summary_writer()
        self._folder = Path(folder)
        self._seconds_per_write = seconds_per_write
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()  # backward hooks send records from other threads
        self._writer: Any = None  # a SummaryWriter of torch
        self._pace = Throughput()
        self._pending: list[tuple[float, Record, float | None]] = []
        self._written_seconds = clock()

    def observe(self, record: Record, /) -> None:
        """Buffer a record; write the buffered records if they are due."""
        if record.rank != 0:
            return
        with self._lock:
            now = self._clock()
            match record:
                case StartRecord():
                    self._start(record, now)
                case StepRecord():
                    self._pace.step(now, record.num_samples)
                    self._buffer(record, self._pace.samples_per_second)
                    if now - self._written_seconds >= self._seconds_per_write:
                        self._write()
                case EvaluateRecord() | EndRecord():
                    self._pace.other_work(now)
                    self._buffer(record)
                    self._write()
                case CheckpointRecord():
                    self._pace.other_work(now)
                    self._buffer(record)
                case DiagnosisRecord() | OutOfMemoryRecord() | MemoryRecord():
                    self._buffer(record)
                case _:
                    return

    def close(self) -> None:
        """Write buffered charts, and close the file. Closing twice is allowed."""
        with self._lock:
            # Write only if there are records: writing creates a file, and a run without records should leave none.
            if self._pending:
                self._write()
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def _start(self, record: StartRecord, now: float) -> None:
        """Open a new file, and hide the steps of earlier files that a resume has undone."""
        if self._writer is not None:
            self._write()
            self._writer.close()
        # TensorBoard hides the points of older files from `purge_step` on.
        self._writer = self._make_writer(str(self._folder), purge_step=record.first_step + 1)
        self._pace = Throughput()
        self._pace.begin(now)
        text = "\n".join(f"- {line}" for line in lines_of_start(record))
        self._writer.add_text("run", text, record.first_step, self._wall_clock())

    def _buffer(self, record: Record, samples_per_second: float | None = None) -> None:
        self._pending.append((self._wall_clock(), record, samples_per_second))

    def _write(self) -> None:
        """Write the buffered records. Only this method reads numbers from devices."""
        if self._writer is None:  # the start of the run was not observed
            self._writer = self._make_writer(str(self._folder))
        pending, self._pending = self._pending, []
        for wall_seconds, record, samples_per_second in pending:
            if isinstance(record, StepRecord):
                self._add_scalars(_points(record, samples_per_second), record.step + 1, wall_seconds)
            elif isinstance(record, EvaluateRecord):
                # `step` of an evaluation is the number of finished steps; `step` of a step record counts from 0.
                metrics = [(f"evaluation/{name}", value) for name, value in record.metrics.items()]
                self._add_scalars(metrics, record.step, wall_seconds)
            elif isinstance(record, MemoryRecord):
                self._add_scalars(_points_of_memory(record), record.step + 1, wall_seconds)
            elif isinstance(record, EventRecord):
                line, _ = message_of(record, None)
                self._writer.add_text("happenings", line, _num_finished_steps(record), wall_seconds)
        self._writer.flush()
        self._written_seconds = self._clock()

    def _add_scalars(self, points: list[Point], step: int, wall_seconds: float) -> None:
        for name, value in points:
            number = read_number(value)
            if number is not None:
                self._writer.add_scalar(name, number, step, wall_seconds)


def _points(record: StepRecord, samples_per_second: float | None) -> list[Point]:
    """Return the numbers of a step with the names of their charts."""
    points: list[Point] = [("loss", record.loss), ("update_skipped", record.skipped)]
    # The chart of a single term would equal the chart of the loss.
    if len(record.losses) > 1:
        points += [(f"loss_terms/{name}", value) for name, value in record.losses.items()]
    if record.gradient_norm is not None:
        points.append(("gradient_norm", record.gradient_norm))
    if len(record.learning_rates) == 1:
        points.append(("learning_rate", record.learning_rates[0]))
    else:
        points += [(f"learning_rate/group_{number}", rate) for number, rate in enumerate(record.learning_rates)]
    if samples_per_second is not None:
        points.append(("samples_per_second", samples_per_second))
    return points


def _points_of_memory(record: MemoryRecord) -> list[Point]:
    """Return the memory of a device in GiB, with the names of its charts."""
    sizes = {name: getattr(record, f"{name}_bytes") for name in ("peak", "allocated", "reserved", "limit")}
    return [(f"memory_gib/{name}", size / 2**30) for name, size in sizes.items() if size is not None]


def _num_finished_steps(record: EventRecord) -> int:
    """Return the number of finished steps at an event."""
    if isinstance(record, EndRecord):
        return record.num_steps
    if isinstance(record, CheckpointRecord):
        return record.step
    return 0 if record.step is None else record.step + 1


def _summary_writer() -> Callable[..., Any]:
    try:
        # torch's own module imports the package tensorboard, which may be missing.
        module: Any = importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        message = (
            f"TensorBoard output needs the package tensorboard, which is not installed ({error}). "
            "Install it: pip install 'anybatch[tensorboard]'"
        )
        raise UserError(message, code="needs_tensorboard") from None
    writer: Callable[..., Any] = module.SummaryWriter
    return writer
