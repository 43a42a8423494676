"""A run's records as a file: one JSON object per line (https://jsonlines.org), with the schema in `schema.json`.

Lines are appended and never rewritten. The log of a killed run has every line up to the last flush and at most one
unfinished line, which the next run removes. JSON has no NaN and infinities, so they are the strings "NaN", "Infinity"
and "-Infinity"; a number that could not be read from its device is null.
"""

import contextlib
import errno
import json
import math
import numbers
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import torch

from anybatch.core.geometry import checked_int, require
from anybatch.core.records import (
    EndRecord,
    EvaluateRecord,
    GradientNoiseRecord,
    MemoryRecord,
    MicroBatchRecord,
    PhaseRecord,
    Record,
    ReductionRecord,
    Scalar,
    StartRecord,
    StepRecord,
)
from anybatch.core.splitting import SplitOptions, plan_batch
from anybatch.errors import UserError
from anybatch.events.log_lines import SCHEMA_VERSION, JsonLine, decoded_object, read_jsonl
from anybatch.events.observer import ClosingObserver

__all__ = ["JsonLine", "JsonlLog", "line_of", "read_jsonl", "record"]

_LINE_START = b'{"version":'
_TAIL_BYTES = 4 << 20  # read from the end of a log; more than the length of its last two lines


class JsonlLog(ClosingObserver):
    """An observer that writes each record as one line of a file. Use it in a `with`, or call `close`.

    Lines of micro-batches, reductions, phases, memory and noise are buffered until a record of another kind arrives.
    Numbers are read from their devices only then, so a run with a log waits for its device once per step, or once in N
    steps with `num_steps_per_flush=N`. At the end of a run the file is synced to the disk (fsync).

    Each rank needs a separate path. If writing fails (a full disk), the caller gets the error, and the unwritten lines
    are lost. The file stays valid, with a gap in `sequence`.

    Args:
        path: the file; its directory is created. An existing log is continued: an unfinished last line is removed, and
            `sequence` continues.
        clock: function that returns a monotonic time in seconds, for the time of every record. With the default clock,
            times of ranks on the same machine are comparable.
        num_steps_per_flush: number of steps whose lines are written together.

    Raises:
        UserError: `path` is a directory, or a file that is not a log.
        OSError: the file cannot be opened or written; `filename` is the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        num_steps_per_flush: int = 1,
    ) -> None:
        """Open the file and find the next sequence number."""
        checked_int("num_steps_per_flush", num_steps_per_flush)
        require(isinstance(path, (str, os.PathLike)), "path", path, "the path of a file")
        self._path = Path(path)
        self._clock = clock
        self._num_steps_per_flush = num_steps_per_flush
        self._num_steps_pending = 0
        self._pending: list[JsonLine] = []
        self._lock = threading.Lock()  # backward hooks send records of reductions from other threads
        self._file = _open(self._path)
        try:
            self._sequence = _resume(self._file, self._path)
        except BaseException:
            self._file.close()
            raise

    def observe(self, record: Record, /) -> None:
        """Add the sequence number and time to a record, and write it now or with the next flush."""
        with self._lock:
            self._pending.append(_line(record, self._sequence, self._clock()))
            self._sequence += 1
            if self._is_due(record):
                self._write_pending()
            if isinstance(record, EndRecord):
                self._sync()

    def close(self) -> None:
        """Write buffered lines, sync them to the disk, and close the file. Closing twice is allowed."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._write_pending()
                self._sync()
            finally:
                self._file.close()

    def _is_due(self, record: Record) -> bool:
        if isinstance(record, StepRecord):
            self._num_steps_pending += 1
            return self._num_steps_pending >= self._num_steps_per_flush
        buffered = MicroBatchRecord | ReductionRecord | PhaseRecord | MemoryRecord | GradientNoiseRecord
        return not isinstance(record, buffered)

    def _write_pending(self) -> None:
        lines, self._pending, self._num_steps_pending = self._pending, [], 0
        # Encoding reads the tensors, so a run with a log waits for its device here.
        unwritten = memoryview(b"".join(map(_encoded, lines)))
        with _errors_with_path(self._path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                while unwritten:  # an unbuffered write may be partial
                    unwritten = unwritten[self._file.write(unwritten) :]
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.truncate(end)  # a partial line must not be continued later
                raise

    def _sync(self) -> None:
        try:
            with _errors_with_path(self._path):
                os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno != errno.EINVAL:  # there is no disk, as with /dev/null
                raise


class RunRecorder:
    """Logs the steps of a training loop, see `record`."""

    def __init__(self, log: JsonlLog, first_step: int) -> None:
        self._log, self.num_steps = log, first_step

    def step(self, loss: Scalar, *, num_samples: int = 0, **metrics: Scalar) -> None:
        """Log a step with its loss and metrics; `learning_rate` and `gradient_norm` are plotted as for the engine."""
        norm, rate = metrics.pop("gradient_norm", None), metrics.pop("learning_rate", None)
        both = {"rank": 0, "num_samples": num_samples}
        unused = {"epoch": 0, "sample_offset": 0, "num_micro_batches": 1, "losses": {}, "counts": {}, "clipped": None}
        rates = () if rate is None else (rate,)
        values = {"loss": loss, "gradient_norm": norm, "learning_rates": rates, "skipped": False}
        self._log.observe(StepRecord(step=self.num_steps, **both, **unused, **values))  # type: ignore[arg-type]
        self.num_steps += 1
        if metrics:
            self._log.observe(EvaluateRecord(step=self.num_steps, metrics=metrics, **both))


@contextlib.contextmanager
def record(path: str | os.PathLike[str], /, *, first_step: int = 0, **settings: object) -> Iterator[RunRecorder]:
    """Log a training loop that does not use the engine, with its settings, for `anybatch watch`; call it on one rank.

    `path` is the folder of the run, or a file `*.jsonl`. `first_step` is the number of steps before a resume.
    """
    names = ("effective_batch_size", "micro_batch_size", "ranks")
    effective, micro, ranks = (checked_int(name, settings[name]) if name in settings else None for name in names)
    unknown = dict.fromkeys(("geometry", "strategy", "precision", "device", "dtype"), "not recorded")
    if effective and micro:
        unknown["geometry"] = str(plan_batch(effective, ranks or 1, SplitOptions(micro_batch_size=micro)))
    sizes = {"rank": 0, "world_size": ranks or 1, "num_parameters": 0, "gradient_bytes": 0, "first_step": first_step}
    batch = {"effective_batch_size": effective, "micro_batch_size": micro, "seed": None}
    decisions = {name: str(value) for name, value in settings.items()}
    with JsonlLog(path if Path(path).suffix == ".jsonl" else Path(path) / "events.jsonl") as log:
        log.observe(StartRecord(**sizes, **unknown, **batch, versions={}, decisions=decisions))  # type: ignore[arg-type]
        run, message, status = RunRecorder(log, first_step), None, "completed"
        try:
            yield run
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "stopped"
            message = f"{type(error).__name__}: {error}"
            raise
        finally:
            end = {"status": status, "num_steps": run.num_steps, "message": message, "digest": None}
            log.observe(EndRecord(rank=0, **end))  # type: ignore[arg-type]


def line_of(record: Record, *, sequence: int, time_seconds: float) -> JsonLine:
    """Return a record as a line of a log; this reads its tensors, and so waits for their devices."""
    line: JsonLine = json.loads(_encoded(_line(record, sequence, time_seconds)))
    return line


def _line(record: Record, sequence: int, time_seconds: float) -> JsonLine:
    """Return the line of a record, without reading tensors from their device."""
    body = {field.name: _plain(getattr(record, field.name)) for field in fields(record)}
    head = {"version": SCHEMA_VERSION, "sequence": sequence, "time_seconds": round(time_seconds, 6)}
    return {**head, "kind": record.kind, **body}


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        message = f"the log's path {path} is a directory. Pass a file in it, such as {path / 'events.jsonl'}."
        raise UserError(message, code="is_a_folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Unbuffered, because forked loader workers would inherit buffered lines and write them again.
    return path.open("a+b", buffering=0)


@contextlib.contextmanager
def _errors_with_path(path: Path) -> Iterator[None]:
    """Add the path to each `OSError` raised within the context."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def _resume(file: BinaryIO, path: Path) -> int:
    """Remove an unfinished last line, and return the next sequence number."""
    end = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(len(_LINE_START)) if end else b""
    # An empty file, or a part of the first line (of a killed run), is also a log.
    if not _LINE_START.startswith(head):
        message = f"{path} exists, but is not a log of anybatch. Move it away, or choose another path."
        raise UserError(message, code="not_a_log")
    # Only the end is read, because a log may have many gigabytes.
    file.seek(max(0, end - _TAIL_BYTES))
    full, _, unfinished = file.read().rpartition(b"\n")
    if unfinished:
        file.truncate(end - len(unfinished))
    if not full:
        return 0
    last = decoded_object(full.rpartition(b"\n")[2])
    if last is None or not isinstance(last.get("sequence"), int):
        message = f"the last line of {path} is not a line of a log. Move the file away, or choose another path."
        raise UserError(message, code="not_a_log")
    return int(last["sequence"]) + 1


def _plain(value: object) -> object:
    """Return `value` as JSON data, except that a tensor remains a (detached) tensor until the line is written."""
    if value is None or isinstance(value, str | bool | int):  # bool before numbers: JSON has a separate literal for it
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, numbers.Real):  # a float, or a number of numpy
        return _finite(float(value))
    message = f"a record holds {type(value).__name__} {value!r}; a log takes numbers, text, and mappings of them."
    raise TypeError(message)


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _read(tensor: torch.Tensor) -> float | str | None:
    """Return the number in a tensor, waiting for its device; None if the device failed or the tensor has no data."""
    assert tensor.numel() == 1, f"a record holds a tensor of shape {tuple(tensor.shape)}, not one number"
    try:
        value = tensor.item()
    except RuntimeError:
        return None
    return value if isinstance(value, bool | int) else _finite(value)


def _encoded(line: JsonLine) -> bytes:
    return json.dumps(line, default=_read, allow_nan=False, separators=(",", ":")).encode() + b"\n"
