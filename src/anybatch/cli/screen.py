"""The terminal output of a run: its folder, its progress, and a summary."""

import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from anybatch.core.headroom import Reserve, describe_reserve
from anybatch.core.records import CheckpointRecord, DiagnosisRecord, EndRecord, Observer, Observers, Record, StartRecord
from anybatch.core.units import duration, in_bytes, per_second, three_digits
from anybatch.errors import UserError
from anybatch.events.console import Console
from anybatch.events.plot import plot_losses
from anybatch.events.tensorboard import TensorBoardLog
from anybatch.memory.counted import MEANINGS
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.session import SessionResult, SessionStart

_NAME_WIDTH: Final = 13


_STOPPING = DiagnosisRecord(
    rank=0,
    step=None,
    code="stopping",
    level="warning",
    message="stopping after this step and saving a checkpoint; press Ctrl-C again to quit without saving",
    remedy=None,
)


class ConsoleFilter:
    """An observer that passes on only the records to show on the console.

    Saved checkpoints are in the log and the summary; the reason of a failure is printed once for all ranks.
    """

    def __init__(self, console: Console, stop_requested: Callable[[], bool] | None = None) -> None:
        self._console = console
        self._stop_requested = stop_requested

    def observe(self, record: Record, /) -> None:
        """Pass on a record, unless it is shown elsewhere."""
        stop_requested = self._stop_requested
        if stop_requested is not None and not isinstance(record, StartRecord | EndRecord) and stop_requested():
            self._stop_requested = None  # reported once
            self._console.observe(_STOPPING)
        if isinstance(record, EndRecord) and record.status == "failed":
            self._console.close()
        elif not isinstance(record, CheckpointRecord) or record.event != "saved":
            self._console.observe(record)


class RunDisplay:
    """Shows a run on rank 0: on the console, and in TensorBoard if installed. Use it in a `with`."""

    def __init__(self, stop_requested: Callable[[], bool] | None) -> None:
        # A line of the signal handler would be overwritten by the bar of a terminal.
        self._stop_requested = stop_requested if sys.stderr.isatty() else None
        self._console: Console | None = None
        self._charts: TensorBoardLog | None = None
        self.missing = ""
        """Why TensorBoard is not available, and how to install it; empty if it is."""

    def begin(self, session: SessionStart) -> Observer:
        """Print the run's folder, and return the observer that shows the run.

        Progress goes to standard error; standard output is for the result.
        """
        # Before the first step, so that the folder is known even if the run is killed within it.
        sys.stderr.write(f"{place_of(session)}\n")
        sys.stderr.flush()
        self._console = Console(session.num_steps)
        observers: list[Observer] = [ConsoleFilter(self._console, self._stop_requested)]
        try:
            self._charts = TensorBoardLog(session.folder.tensorboard)
            observers.append(self._charts)
        except UserError as error:
            self.missing = str(error)
        return Observers(*observers)

    def __enter__(self) -> Self:
        """Return the display itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal and close TensorBoard's file."""
        if self._console is not None:
            self._console.close()
        if self._charts is not None:
            # A full disk, for example, also fails here; the first error is the one to show.
            with nullcontext() if error is None else suppress(Exception):
                self._charts.close()


def place_of(session: SessionStart) -> str:
    """Return the files of a run, in one line."""
    folder = session.folder
    return f"run in {folder.path}: log {folder.log(0).name}, checkpoints in {folder.checkpoints.name}/"


def summary(result: SessionResult, *, tensorboard: str) -> str:
    """Return the result of a session: time, loss, metrics, files, and the command to continue."""
    lines = {"stopped" if result.stopped else "finished": _effort(result)}
    if result.loss is not None:
        lines["loss"] = f"{three_digits(result.loss)} in the last step"
    if result.metrics:
        lines["metrics"] = _listed(result.metrics)
    if result.peak_bytes is not None:
        lines["memory"] = _memory(result.peak_bytes, result.limit_bytes)
    lines["settings"] = str(result.folder.header)
    lines["log"] = _logs(result.folder)
    if result.loss is not None:
        lines["plot"] = _picture(result.folder)
        lines["tensorboard"] = tensorboard or f"tensorboard --logdir {shlex.quote(str(result.folder.tensorboard))}"
    if result.checkpoint is not None:
        lines["checkpoint"] = str(result.checkpoint)
    command = resume_command(result.folder.path)
    lines["resume" if result.stopped else "train on"] = command if result.stopped else f"{command} --epochs N"
    return "".join(f"{name:<{_NAME_WIDTH}}{text}\n" for name, text in lines.items())


def _logs(folder: RunFolder) -> str:
    num_others = len(list(folder.path.glob("events-rank-*.jsonl")))
    return f"{folder.log(0)}{f' (and {num_others} of other ranks)' * bool(num_others)}"


def _picture(folder: RunFolder) -> str:
    """Draw the losses and return their files, or the reason why it failed: a failed picture must not fail the run."""
    try:
        return ", ".join(map(str, plot_losses(folder.log(0), folder.plots)))
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (the run is complete and saved)
        return f"not drawn, because of {type(error).__name__}: {' '.join(str(error).split())}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"anybatch train --resume --out {shlex.quote(str(folder))}"


def _effort(result: SessionResult) -> str:
    if result.num_session_steps == 0:
        return f"nothing left to do: all {result.num_steps:,} steps were already made"
    steps = f"{result.num_session_steps:,} step{'s' * (result.num_session_steps != 1)}"
    in_all = f" ({result.num_steps:,} in total)" if result.num_steps != result.num_session_steps else ""
    speed = result.num_session_samples / result.stepping_seconds if result.stepping_seconds > 0 else None
    return (
        f"{steps}{in_all}, {result.num_session_samples:,} samples in "
        f"{duration(result.session_seconds)}, {per_second(speed)} samples/s while training"
    )


def _memory(peak_bytes: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return f"peak {in_bytes(peak_bytes)} (resident memory of the rank 0 process)"
    return f"{describe_reserve(Reserve(peak_bytes, limit_bytes))}; allocated on rank 0: {MEANINGS['allocated']}"


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
