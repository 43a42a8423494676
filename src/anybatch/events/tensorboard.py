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
Happening = CheckpointRecord | DiagnosisRecord | OutOfMemoryRecord | EndRecord


class TensorBoardLog(ClosingObserver):
    """An observer that writes for TensorBoard. Use it in a `with`, or call `close`.

    ```bash
    pip install 'anybatch[tensorboard]'
    tensorboard --logdir runs
    ```

    Charts: `loss`, each of `loss_terms/...` if there are several, `gradient_norm`, `learning_rate` (one for each
    parameter group), `samples_per_second`, `memory_gib/peak` and other numbers of the device's memory, `update_skipped`
    once a step was skipped, `evaluation/...`. Texts: the split and the decisions (`run`), and events (`happenings`).
    The horizontal axis is always the number of steps made, including the step itself. Steps undone by a resume are
    hidden.

    Only rank 0 writes. Steps are buffered for some seconds and read from their device together, so the loop does not
    wait for it in each step; a killed run loses the buffered part.

    Args:
        folder: folder of TensorBoard's files, one per run; created if it is missing.
        seconds_per_write: maximum seconds that a step is buffered.
        clock: monotonic time in seconds.
        wall_clock: seconds since 1970, for the time of every record.

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
        self._has_skipped = False

    def observe(self, record: Record, /) -> None:
        """Buffer a record, or write it with all buffered ones."""
        if record.rank != 0:
            return
        with self._lock:
            now = self._clock()
            match record:
                case StartRecord():
                    self._start(record, now)
                case StepRecord():
                    self._pace.step(now, record.num_samples)
                    self._keep(record, self._pace.samples_per_second)
                    if now - self._written_seconds >= self._seconds_per_write:
                        self._write()
                case EvaluateRecord() | EndRecord():
                    self._pace.aside(now)
                    self._keep(record)
                    self._write()
                case CheckpointRecord():
                    self._pace.aside(now)
                    self._keep(record)
                case DiagnosisRecord() | OutOfMemoryRecord() | MemoryRecord():
                    self._keep(record)
                case _:
                    return

    def close(self) -> None:
        """Write buffered charts, and close the file. Closing twice is allowed."""
        with self._lock:
            # Writing opens a file, which a run without records should not leave.
            if self._pending:
                self._write()
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def _start(self, record: StartRecord, now: float) -> None:
        """Open a file whose purge step hides the steps that a resume has undone in earlier files."""
        if self._writer is not None:
            self._write()
            self._writer.close()
        # In older files TensorBoard hides everything from the purge step on.
        self._writer = self._make_writer(str(self._folder), purge_step=record.first_step + 1)
        self._pace = Throughput()
        self._pace.begin(now)
        text = "\n".join(f"- {line}" for line in lines_of_start(record))
        self._writer.add_text("run", text, record.first_step, self._wall_clock())

    def _keep(self, record: Record, samples_per_second: float | None = None) -> None:
        self._pending.append((self._wall_clock(), record, samples_per_second))

    def _write(self) -> None:
        """Write the buffered records; only here are numbers read."""
        if self._writer is None:  # the start of the run was not observed
            self._writer = self._make_writer(str(self._folder))
        kept, self._pending = self._pending, []
        for wall_seconds, record, samples_per_second in kept:
            if isinstance(record, StepRecord):
                points = _points(record, samples_per_second)
                # Most runs never skip, so this chart appears only if needed.
                self._has_skipped = self._has_skipped or read_number(record.skipped) == 1
                if self._has_skipped:
                    points = [*points, ("update_skipped", record.skipped)]
                self._add_scalars(points, record.step + 1, wall_seconds)
            elif isinstance(record, EvaluateRecord):
                # Evaluations count the steps made; a step has its own number, from 0.
                metrics = [(f"evaluation/{name}", value) for name, value in record.metrics.items()]
                self._add_scalars(metrics, record.step, wall_seconds)
            elif isinstance(record, MemoryRecord):
                self._add_scalars(_points_of_memory(record), record.step + 1, wall_seconds)
            elif isinstance(record, Happening):
                line, _ = message_of(record, None)
                self._writer.add_text("happenings", line, _steps_made(record), wall_seconds)
        self._writer.flush()
        self._written_seconds = self._clock()

    def _add_scalars(self, points: list[Point], step: int, wall_seconds: float) -> None:
        for name, value in points:
            number = read_number(value)
            if number is not None:
                self._writer.add_scalar(name, number, step, wall_seconds)


def _points(record: StepRecord, samples_per_second: float | None) -> list[Point]:
    """Return the numbers of a step under the names of their charts."""
    points: list[Point] = [("loss", record.loss)]
    # A single term is the loss itself.
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
    """Return the memory of a device, in GiB, under the names of its charts."""
    sizes = {
        "peak": record.peak_bytes,
        "allocated": record.allocated_bytes,
        "reserved": record.reserved_bytes,
        "limit": record.limit_bytes,
    }
    return [(f"memory_gib/{name}", size / 2**30) for name, size in sizes.items() if size is not None]


def _steps_made(record: Happening) -> int:
    """Return the number of steps at an event."""
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
