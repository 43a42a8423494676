"""A run in plain lines: what it is, how far it is, what it has found. Fit for a terminal, a pipe and a log file."""

import time
from collections.abc import Callable, Mapping

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EvaluateRecord,
    OutOfMemoryRecord,
    Record,
    Scalar,
    StartRecord,
    StepRecord,
)
from anybatch.recipes.session import Outcome, Outlook

Write = Callable[[str], object]


class Lines:
    """An observer that writes lines: a banner, progress at most every few seconds, evaluations, what went wrong.

    Reading the loss of a step waits for the device, so it is read for the steps that get a line, and for no others.

    Args:
        outlook: what is known before the first step.
        write: is given each line, with its end.
        clock: seconds that only go forward.
        seconds_per_line: least time between two lines of progress.
    """

    def __init__(
        self,
        outlook: Outlook,
        write: Write,
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds_per_line: float = 2.0,
    ) -> None:
        self._outlook = outlook
        self._write = write
        self._clock = clock
        self._seconds_per_line = seconds_per_line
        self._line_seconds: float | None = None
        self._num_samples = 0

    def observe(self, record: Record, /) -> None:
        """Write what is worth a line."""
        match record:
            case StartRecord():
                self._write(banner(record, self._outlook))
            case StepRecord():
                self._step(record)
            case EvaluateRecord():
                self._write(f"evaluated after step {record.step}: {listed(record.metrics)}\n")
            case DiagnosisRecord():
                self._write(f"{record.level}: {record.message}\n")
            case CheckpointRecord(event="loaded"):
                self._write(f"resumed after step {record.step} from {record.path}\n")
            case CheckpointRecord(event="fell_back"):
                self._write(f"WARNING: passed over the damaged checkpoint {record.path}: {record.message}\n")
            case OutOfMemoryRecord():
                sizes = f"{record.micro_batch_size_before} -> {record.micro_batch_size_after}"
                self._write(f"WARNING: out of memory in step {record.step + 1}: micro-batch size {sizes}\n")
            case _:
                return

    def _step(self, record: StepRecord) -> None:
        now = self._clock()
        self._num_samples += record.num_samples
        number, last = record.step + 1, self._outlook.num_steps
        if self._line_seconds is None:
            rate = ""
        elif now - self._line_seconds < self._seconds_per_line and number != last:
            return
        else:
            rate = f"  {self._num_samples / max(now - self._line_seconds, 1e-9):,.0f} samples/s"
        self._line_seconds, self._num_samples = now, 0
        of = "" if last is None else f"/{last}"
        epoch = record.epoch + (record.sample_offset > 0)
        skipped = "  skipped: gradients overflowed" if bool(record.skipped) else ""
        self._write(
            f"step {number}{of}  epoch {epoch}  loss {float(record.loss):.4f}"
            f"  lr {float(record.learning_rates[0]):.3g}{rate}{skipped}\n"
        )


def banner(start: StartRecord, outlook: Outlook) -> str:
    """Return what a run is, in a few lines."""
    strategy = start.decisions.get("strategy", start.strategy)
    steps = _known(outlook.num_steps)
    lines = {
        "batch": start.geometry,
        "steps": f"{steps}, {outlook.first_step:,} of them made" if outlook.first_step else steps,
        "device": f"{start.device}, {start.precision}, strategy {strategy}",
        "rate": start.decisions.get("learning_rate", "as the optimizer says"),
        "model": f"{start.num_parameters:,} parameters of {start.dtype}, gradients of {size(start.gradient_bytes)}",
        "files": f"{outlook.folder.path}: {outlook.folder.log(start.rank).name}, {outlook.folder.checkpoints.name}/",
    }
    return "".join(f"{name:<7} {text}\n" for name, text in lines.items())


def summary(outcome: Outcome, resume_command: str) -> str:
    """Return how a session ended, in a few lines."""
    steps = f"{outcome.num_session_steps:,} steps" + f" ({outcome.num_steps:,} in all)" * (
        outcome.num_steps != outcome.num_session_steps
    )
    speed = outcome.num_session_samples / outcome.stepping_seconds if outcome.stepping_seconds > 0 else 0.0
    lines = {
        "stopped" if outcome.stopped else "done": (
            f"{steps}, {outcome.num_session_samples:,} samples in {outcome.session_seconds:.1f} s, "
            f"{speed:,.0f} samples/s while stepping"
        )
    }
    if outcome.num_session_steps == 0:
        lines = {"done": f"nothing was left to do: the run has made its {outcome.num_steps:,} steps"}
    if outcome.loss is not None:
        lines["loss"] = f"{outcome.loss:.4f} in the last step"
    if outcome.metrics:
        lines["metrics"] = listed(outcome.metrics)
    lines["log"] = str(outcome.folder.log(0))
    if outcome.checkpoint is not None:
        lines["saved"] = str(outcome.checkpoint)
    if outcome.stopped:
        lines["resume"] = resume_command
    elif outcome.checkpoint is not None:
        lines["more"] = f"{resume_command} --epochs N (or --steps N)"
    return "".join(f"{name:<7} {text}\n" for name, text in lines.items())


def listed(values: Mapping[str, Scalar]) -> str:
    """Return names and numbers in one line."""
    return ", ".join(f"{name} {float(value):.4f}" for name, value in values.items()) or "nothing"


def size(num_bytes: int) -> str:
    """Return a number of bytes the way people say it."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1 << 10 * power:
            return f"{num_bytes / (1 << 10 * power):.1f} {unit}"
    return f"{num_bytes} bytes"


def _known(number: int | None) -> str:
    return "until the data ends" if number is None else f"{number:,}"
