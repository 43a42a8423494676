"""A run in TensorBoard, Weights & Biases, MLflow, trackio or Comet: the numbers of each step."""

import contextlib
import importlib
import os
import sys
import threading
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final

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


class MetricsLog(ClosingObserver):
    """An observer that writes the numbers of a run with a logging library. Use it in a `with`, or call `close`.

    Charts: `loss`, each of `loss_terms/...` if there are several, `gradient_norm`, `learning_rate` (one for each
    parameter group), `samples_per_second`, `update_skipped`, `memory_gib/peak` and other numbers of the device's
    memory, `evaluation/...`. The horizontal axis is always the number of finished steps, including the step itself.
    A resumed run continues the library's run, which the file `logger-id` in the folder identifies.

    Only rank 0 writes. Steps are buffered for some seconds, and their numbers are read from the device together, so the
    loop does not wait for the device in each step. A killed run loses the buffered steps.

    Args:
        folder: folder of the run, created if it is missing; its name is the name of the run.
        seconds_per_write: maximum seconds that a step is buffered.
        clock: function that returns a monotonic time in seconds.
        wall_clock: function that returns the seconds since 1970, for the time of every record.
    """

    extra: ClassVar[str]  # name of the library, and of the extra that installs it
    module: ClassVar[str]  # imported when the observer is made

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seconds_per_write: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Import the library; the run in it is opened when the run starts."""
        # Imported now, so that a missing package is an error before the first step.
        self._library = _imported(self.module, self.extra)
        self._folder = Path(folder)
        self._seconds_per_write = seconds_per_write
        self._clock, self._wall_clock = clock, wall_clock
        self._lock = threading.Lock()  # backward hooks send records from other threads
        self._run: Any = None  # the library's run
        self._pace = Throughput()
        self._pending: list[tuple[float, Record, float | None]] = []
        self._written_seconds = clock()

    @abstractmethod
    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401 (an object of the library)
        """Return the library's run; `start` is None if the start of the run was not observed."""

    def _add(self, numbers: Mapping[str, float], step: int, wall_seconds: float) -> None:  # noqa: ARG002
        """Write numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def _add_text(self, name: str, text: str, step: int, wall_seconds: float) -> None:
        """Write a sentence; most libraries have no place for it."""

    def _flush(self) -> None:
        """Write what the library buffers."""

    def _finish(self) -> None:
        """Close the library's run."""
        self._run.finish()

    def _id(self) -> str:
        """Return 32 letters that identify the run of this folder, also after a resume."""
        file = self._folder / "logger-id"
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text(uuid.uuid4().hex, encoding="utf-8")
        return file.read_text(encoding="utf-8")

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
            self._end()

    def _start(self, record: StartRecord, now: float) -> None:
        """Open the library's run."""
        if self._run is not None:
            self._write()
            self._end()
        self._begin(record)
        self._pace = Throughput()
        self._pace.begin(now)
        text = "\n".join(f"- {line}" for line in lines_of_start(record))
        self._add_text("run", text, record.first_step, self._wall_clock())

    def _begin(self, start: StartRecord | None) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print, but standard output has only results
            self._run = self._open(start)

    def _end(self) -> None:
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._finish()
        self._run = None

    def _buffer(self, record: Record, samples_per_second: float | None = None) -> None:
        self._pending.append((self._wall_clock(), record, samples_per_second))

    def _write(self) -> None:
        """Write the buffered records. Only this method reads numbers from devices."""
        if self._run is None:
            self._begin(None)
        pending, self._pending = self._pending, []
        for wall_seconds, record, samples_per_second in pending:
            if isinstance(record, StepRecord):
                self._add_points(_points(record, samples_per_second), record.step + 1, wall_seconds)
            elif isinstance(record, EvaluateRecord):
                # `step` of an evaluation is the number of finished steps; `step` of a step record counts from 0.
                metrics = [(f"evaluation/{name}", value) for name, value in record.metrics.items()]
                self._add_points(metrics, record.step, wall_seconds)
            elif isinstance(record, MemoryRecord):
                sizes = {name: getattr(record, f"{name}_bytes") for name in ("peak", "allocated", "reserved", "limit")}
                points = [(f"memory_gib/{name}", size / 2**30) for name, size in sizes.items() if size is not None]
                self._add_points(points, record.step + 1, wall_seconds)
            elif isinstance(record, EventRecord):
                line, _ = message_of(record, None)
                self._add_text("happenings", line, _num_finished_steps(record), wall_seconds)
        self._flush()
        self._written_seconds = self._clock()

    def _add_points(self, points: Iterable[Point], step: int, wall_seconds: float) -> None:
        numbers = {name: number for name, value in points if (number := read_number(value)) is not None}
        self._add(numbers, step, wall_seconds)


class TensorBoardLog(MetricsLog):
    """An observer that writes for TensorBoard; see `MetricsLog`, but `folder` is a separate one for its files.

    It also writes texts: sizes and automatic choices (`run`), and events (`happenings`). Steps undone by a resume are
    hidden. `tensorboard --logdir runs` shows the charts.
    """

    extra, module = "tensorboard", "torch.utils.tensorboard"

    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401
        # TensorBoard hides the points of older files from `purge_step` on.
        return self._library.SummaryWriter(str(self._folder), purge_step=start and start.first_step + 1)

    def _add(self, numbers: Mapping[str, float], step: int, wall_seconds: float) -> None:
        for name, number in numbers.items():
            self._run.add_scalar(name, number, step, wall_seconds)

    def _add_text(self, name: str, text: str, step: int, wall_seconds: float) -> None:
        self._run.add_text(name, text, step, wall_seconds)

    def _flush(self) -> None:
        self._run.flush()

    def _finish(self) -> None:
        self._run.close()


class WandbLog(MetricsLog):
    """An observer that writes to Weights & Biases; see `MetricsLog`."""

    extra, module = "wandb", "wandb"

    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401
        names = {"name": self._folder.name, "id": self._id(), "dir": str(self._folder)}
        return self._library.init(**names, resume="allow", config=_settings(start))


class MlflowLog(MetricsLog):
    """An observer that writes to MLflow; see `MetricsLog`."""

    extra, module = "mlflow", "mlflow"

    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401
        flow = self._library
        for run in flow.search_runs(filter_string=f"tags.`anybatch.id` = '{self._id()}'", output_format="list"):
            return flow.start_run(run_id=run.info.run_id)
        run = flow.start_run(run_name=self._folder.name, tags={"anybatch.id": self._id()})
        flow.log_params(_settings(start))
        return run

    def _add(self, numbers: Mapping[str, float], step: int, wall_seconds: float) -> None:
        times = {"step": step, "timestamp": int(1000 * wall_seconds)}
        self._library.log_metrics(dict(numbers), **times, synchronous=True, run_id=self._run.info.run_id)

    def _finish(self) -> None:
        self._library.end_run()


class TrackioLog(MetricsLog):
    """An observer that writes to trackio; see `MetricsLog`."""

    extra, module = "trackio", "trackio"

    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401
        # Runs of one project with equal names would be one run.
        name = f"{self._folder.name}-{self._id()[:6]}"
        return self._library.init("anybatch", name, resume="allow", embed=False, config=_settings(start))

    def _finish(self) -> None:
        self._library.finish()  # with `self._run.finish()`, it would finish again at exit


class CometLog(MetricsLog):
    """An observer that writes to Comet; see `MetricsLog`."""

    extra, module = "comet", "comet_ml"

    def _open(self, start: StartRecord | None) -> Any:  # noqa: ANN401
        run = self._library.start(experiment_key=self._id())
        run.set_name(self._folder.name)
        run.log_parameters(_settings(start))
        return run

    def _add(self, numbers: Mapping[str, float], step: int, wall_seconds: float) -> None:  # noqa: ARG002
        self._run.log_metrics(dict(numbers), step=step)

    def _finish(self) -> None:
        self._run.end()


LIBRARIES: Final[Mapping[str, type[MetricsLog]]] = MappingProxyType(
    {library.extra: library for library in (WandbLog, MlflowLog, TrackioLog, CometLog)}
)


def _settings(start: StartRecord | None) -> dict[str, str | int]:
    """Return the settings of a run as one level of names."""
    if start is None:
        return {}
    values = {field.name: getattr(start, field.name) for field in fields(start)}
    return dict(start.decisions) | {name: value for name, value in values.items() if isinstance(value, str | int)}


def _imported(module: str, extra: str) -> Any:  # noqa: ANN401 (a module)
    try:
        return importlib.import_module(module)  # torch's own module imports the package tensorboard
    except ImportError as error:
        missing = f"logging to {extra} needs a package that is not installed ({error})."
        message = f"{missing} Install it: pip install 'anybatch[{extra}]'"
        raise UserError(message, code=f"needs_{extra}") from None


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


def _num_finished_steps(record: EventRecord) -> int:
    """Return the number of finished steps at an event."""
    if isinstance(record, EndRecord):
        return record.num_steps
    if isinstance(record, CheckpointRecord):
        return record.step
    return 0 if record.step is None else record.step + 1
