"""What a person sees of a run: where it is, what happens in it, and how it ended."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from anybatch.core.headroom import Reserve, about_reserve
from anybatch.core.records import CheckpointRecord, DiagnosisRecord, EndRecord, Observer, Record, StartRecord
from anybatch.core.units import duration, in_bytes, per_second, three_digits
from anybatch.errors import UserError
from anybatch.events.console import Console
from anybatch.events.plot import plot_losses
from anybatch.events.tensorboard import TensorBoardLog
from anybatch.recipes.run.folder import RunFolder
from anybatch.recipes.run.session import Outcome, Outlook

_NAME_WIDTH: Final = 13


_STOPPING = DiagnosisRecord(
    rank=0,
    step=None,
    code="stopping",
    level="warning",
    message="asked to stop: stopping after this step, and saving; Ctrl-C (again) ends at once, without",
    remedy=None,
)


class Screen:
    """An observer that shows a run on a console, but for what is told elsewhere.

    That a checkpoint was saved is in the log, and in the summary for the last one. Why a run failed is told at the
    end, once, for all ranks.

    Args:
        console: where to.
        asked: function () -> whether somebody has asked the run to stop, where the console should say so; a line that
            a signal handler writes would be lost under the bar.
    """

    def __init__(self, console: Console, asked: Callable[[], bool] | None = None) -> None:
        self._console = console
        self._asked = asked

    def observe(self, record: Record, /) -> None:
        """Show a record, unless it is told elsewhere."""
        if self._asked is not None and not isinstance(record, StartRecord | EndRecord) and self._asked():
            self._asked = None
            self._console.observe(_STOPPING)
        if isinstance(record, EndRecord) and record.status == "failed":
            self._console.close()
        elif not isinstance(record, CheckpointRecord) or record.event != "saved":
            self._console.observe(record)


class _Both:
    """Passes records on."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def observe(self, record: Record, /) -> None:
        """Tell everybody."""
        for observer in self._observers:
            observer.observe(record)


class Onlookers:
    """Who looks in on a run from rank 0: the console and, where it is installed, TensorBoard. Use it in a `with`.

    Args:
        asked: function () -> whether somebody has asked the run to stop; None if that is not known.
    """

    def __init__(self, asked: Callable[[], bool] | None) -> None:
        self._asked = asked if sys.stderr.isatty() else None
        self._console: Console | None = None
        self._charts: TensorBoardLog | None = None
        self.missing = ""
        """Why there is nothing for TensorBoard, and how to get it; empty if there is something."""

    def begin(self, outlook: Outlook) -> Observer:
        """Say where the run is and return who is told of it.

        Progress goes to the standard error, so that the standard output is the result.
        """
        sys.stderr.write(f"{place_of(outlook)}\n")
        sys.stderr.flush()
        self._console = Console(outlook.num_steps)
        observers: list[Observer] = [Screen(self._console, self._asked)]
        try:
            self._charts = TensorBoardLog(outlook.folder.tensorboard)
            observers.append(self._charts)
        except UserError as error:
            self.missing = str(error)
        return _Both(observers)

    def __enter__(self) -> Self:
        """Return the onlookers themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back and close TensorBoard's file, however the run has ended."""
        if self._console is not None:
            self._console.close()
        if self._charts is not None:
            # A full disk, say, has ended the run and ends this too: the first error is the one to tell.
            with nullcontext() if error is None else suppress(Exception):
                self._charts.close()


def place_of(outlook: Outlook) -> str:
    """Return where a run's files are, in one line."""
    folder = outlook.folder
    return f"run in {folder.path}: log {folder.log(0).name}, checkpoints in {folder.checkpoints.name}/"


def summary(outcome: Outcome, *, tensorboard: str) -> str:
    """Return how a session ended: time, numbers, the files that were written, and how to go on.

    Args:
        outcome: how it ended.
        tensorboard: why there is nothing for TensorBoard; empty if there is something.
    """
    lines = {"stopped" if outcome.stopped else "done": _effort(outcome)}
    if outcome.loss is not None:
        lines["loss"] = f"{three_digits(outcome.loss)} in the last step"
    if outcome.metrics:
        lines["metrics"] = _listed(outcome.metrics)
    if outcome.peak_bytes is not None:
        lines["memory"] = _memory(outcome.peak_bytes, outcome.limit_bytes)
    lines["asked for"] = str(outcome.folder.header)
    lines["log"] = _logs(outcome.folder)
    if outcome.loss is not None:
        lines["plot"] = _picture(outcome.folder)
        lines["tensorboard"] = tensorboard or f"tensorboard --logdir {shlex.quote(str(outcome.folder.tensorboard))}"
    if outcome.checkpoint is not None:
        lines["checkpoint"] = str(outcome.checkpoint)
    command = resume_command(outcome.folder.path)
    lines["resume" if outcome.stopped else "longer"] = command if outcome.stopped else f"{command} --epochs N"
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
    """Return what to type to go on with a run."""
    return f"anybatch train --resume --out {shlex.quote(str(folder))}"


def _effort(outcome: Outcome) -> str:
    if outcome.num_session_steps == 0:
        return f"nothing was left to do: the run has made its {outcome.num_steps:,} steps"
    steps = f"{outcome.num_session_steps:,} step{'s' * (outcome.num_session_steps != 1)}"
    in_all = f" ({outcome.num_steps:,} in all)" if outcome.num_steps != outcome.num_session_steps else ""
    speed = outcome.num_session_samples / outcome.stepping_seconds if outcome.stepping_seconds > 0 else None
    return (
        f"{steps}{in_all}, {outcome.num_session_samples:,} samples in "
        f"{duration(outcome.session_seconds)}, {per_second(speed)} samples/s while stepping"
    )


def _memory(peak_bytes: int, limit_bytes: int | None) -> str:
    if limit_bytes is None:
        return f"peak {in_bytes(peak_bytes)} in the process of rank 0"
    return f"{about_reserve(Reserve(peak_bytes, limit_bytes))}, on the device of rank 0"


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
