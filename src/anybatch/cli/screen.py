"""The terminal's side of a run: where its files are, its progress, and a summary at the end."""

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
    message="asked to stop: stopping after this step, and saving; Ctrl-C (again) ends at once, without",
    remedy=None,
)


class ConsoleFilter:
    """An observer that hands a console the records which are shown nowhere else.

    Left out are saved checkpoints, which are in the log, the last one in the summary, and the reason why a run failed,
    which is printed once for all ranks when it has ended.

    Args:
        console: shows the rest.
        stop_requested: function () -> whether the run was asked to stop, where the console should say so; a line that
            a signal handler writes would be lost under the bar.
    """

    def __init__(self, console: Console, stop_requested: Callable[[], bool] | None = None) -> None:
        self._console = console
        self._stop_requested = stop_requested

    def observe(self, record: Record, /) -> None:
        """Show a record, unless it is shown elsewhere."""
        stop_requested = self._stop_requested
        if stop_requested is not None and not isinstance(record, StartRecord | EndRecord) and stop_requested():
            self._stop_requested = None  # said once
            self._console.observe(_STOPPING)
        if isinstance(record, EndRecord) and record.status == "failed":
            self._console.close()
        elif not isinstance(record, CheckpointRecord) or record.event != "saved":
            self._console.observe(record)


class RunDisplay:
    """Shows a run from rank 0: on the console and, where it is installed, for TensorBoard. Use it in a `with`.

    Args:
        stop_requested: function () -> whether the run was asked to stop; None if that is not known.
    """

    def __init__(self, stop_requested: Callable[[], bool] | None) -> None:
        # Without a terminal there is no bar that the signal handler's own line could be lost under.
        self._stop_requested = stop_requested if sys.stderr.isatty() else None
        self._console: Console | None = None
        self._charts: TensorBoardLog | None = None
        self.missing = ""
        """Why there is nothing for TensorBoard, and how to get it; empty if there is something."""

    def begin(self, session: SessionStart) -> Observer:
        """Print where the run is, and return the observer that shows it.

        Progress goes to the standard error, so that the standard output is the result.
        """
        # Before the first step, so that the place is known even if the run is killed within it.
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
        """Give the terminal back and close TensorBoard's file, however the run has ended."""
        if self._console is not None:
            self._console.close()
        if self._charts is not None:
            # A full disk, say, has ended the run and ends this too: the first error is the one to show.
            with nullcontext() if error is None else suppress(Exception):
                self._charts.close()


def place_of(session: SessionStart) -> str:
    """Return where a run's files are, in one line."""
    folder = session.folder
    return f"run in {folder.path}: log {folder.log(0).name}, checkpoints in {folder.checkpoints.name}/"


def summary(result: SessionResult, *, tensorboard: str) -> str:
    """Return how a session ended: time, numbers, the files that were written, and how to go on.

    Args:
        result: how it ended.
        tensorboard: why there is nothing for TensorBoard; empty if there is something.
    """
    lines = {"stopped" if result.stopped else "done": _effort(result)}
    if result.loss is not None:
        lines["loss"] = f"{three_digits(result.loss)} in the last step"
    if result.metrics:
        lines["metrics"] = _listed(result.metrics)
    if result.peak_bytes is not None:
        lines["memory"] = _memory(result.peak_bytes, result.limit_bytes)
    lines["asked for"] = str(result.folder.header)
    lines["log"] = _logs(result.folder)
    if result.loss is not None:
        lines["plot"] = _picture(result.folder)
        lines["tensorboard"] = tensorboard or f"tensorboard --logdir {shlex.quote(str(result.folder.tensorboard))}"
    if result.checkpoint is not None:
        lines["checkpoint"] = str(result.checkpoint)
    command = resume_command(result.folder.path)
    lines["resume" if result.stopped else "longer"] = command if result.stopped else f"{command} --epochs N"
    return "".join(f"{name:<{_NAME_WIDTH}}{text}\n" for name, text in lines.items())


def _logs(folder: RunFolder) -> str:
    num_others = len(list(folder.path.glob("events-rank-*.jsonl")))
    return f"{folder.log(0)}{f' (and {num_others} of other ranks beside it)' * bool(num_others)}"


def _picture(folder: RunFolder) -> str:
    """Draw the losses and return where they are, or why they are not: a picture does not decide how a run has ended."""
    try:
        return ", ".join(map(str, plot_losses(folder.log(0), folder.plots)))
    except UserError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (whatever it was, the run itself is done and saved)
        return f"not drawn, because of {type(error).__name__}: {' '.join(str(error).split())}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return f"anybatch train --resume --out {shlex.quote(str(folder))}"


def _effort(result: SessionResult) -> str:
    if result.num_session_steps == 0:
        return f"nothing was left to do: the run has made its {result.num_steps:,} steps"
    steps = f"{result.num_session_steps:,} step{'s' * (result.num_session_steps != 1)}"
    in_all = f" ({result.num_steps:,} in all)" if result.num_steps != result.num_session_steps else ""
    speed = result.num_session_samples / result.stepping_seconds if result.stepping_seconds > 0 else None
    return (
        f"{steps}{in_all}, {result.num_session_samples:,} samples in "
        f"{duration(result.session_seconds)}, {per_second(speed)} samples/s while stepping"
    )


def _memory(peak_bytes: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return f"peak {in_bytes(peak_bytes)} resident on rank 0: {MEANINGS['resident']}"
    return f"{describe_reserve(Reserve(peak_bytes, limit_bytes))}; allocated on rank 0: {MEANINGS['allocated']}"


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
