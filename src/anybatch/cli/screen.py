"""What a person sees of a run: where it is, what happens in it, and how it ended."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from anybatch.core.records import CheckpointRecord, EndRecord, Record
from anybatch.events.console import Console
from anybatch.events.quantities import duration, per_second, three_digits
from anybatch.recipes.session import Outcome, Outlook


class Screen:
    """An observer that shows a run on a console, but for what is told elsewhere.

    That a checkpoint was saved is in the log, and in the summary for the last one. Why a run failed is told at the
    end, once, for all ranks.

    Args:
        console: where to.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def observe(self, record: Record, /) -> None:
        """Show a record, unless it is told elsewhere."""
        if isinstance(record, EndRecord) and record.status == "failed":
            self._console.close()
        elif not isinstance(record, CheckpointRecord) or record.event != "saved":
            self._console.observe(record)


def place_of(outlook: Outlook) -> str:
    """Return where a run's files are, in one line."""
    folder = outlook.folder
    return f"run in {folder.path}: log {folder.log(0).name}, checkpoints in {folder.checkpoints.name}/"


def summary(outcome: Outcome, *, picture: str | None) -> str:
    """Return how a session ended: time, numbers, files, and how to go on.

    Args:
        outcome: how it ended.
        picture: the plot of its losses, or how to get one; None for neither.
    """
    lines = {"stopped" if outcome.stopped else "done": _effort(outcome)}
    if outcome.loss is not None:
        lines["loss"] = f"{three_digits(outcome.loss)} in the last step"
    if outcome.metrics:
        lines["metrics"] = _listed(outcome.metrics)
    lines["log"] = str(outcome.folder.log(0))
    if picture is not None:
        lines["plot"] = picture
    if outcome.checkpoint is not None:
        lines["saved"] = str(outcome.checkpoint)
    command = resume_command(outcome.folder.path)
    lines["resume" if outcome.stopped else "longer"] = command if outcome.stopped else f"{command} --epochs N"
    return "".join(f"{name:<8} {text}\n" for name, text in lines.items())


def resume_command(folder: Path) -> str:
    """Return what to type to go on with a run."""
    return f"anybatch train --resume --out {shlex.quote(str(folder))}"


def _effort(outcome: Outcome) -> str:
    if outcome.num_session_steps == 0:
        return f"nothing was left to do: the run has made its {outcome.num_steps:,} steps"
    in_all = f" ({outcome.num_steps:,} in all)" if outcome.num_steps != outcome.num_session_steps else ""
    speed = outcome.num_session_samples / outcome.stepping_seconds if outcome.stepping_seconds > 0 else None
    return (
        f"{outcome.num_session_steps:,} steps{in_all}, {outcome.num_session_samples:,} samples in "
        f"{duration(outcome.session_seconds)}, {per_second(speed)} samples/s while stepping"
    )


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
