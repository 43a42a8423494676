"""Shows a run to a person: a progress bar on a terminal, plain lines elsewhere."""

import io
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any, Final, TextIO, cast

from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    Flag,
    MemoryRecord,
    MicroBatchRecord,
    OutOfMemoryRecord,
    Record,
    StartRecord,
    StepRecord,
)
from anybatch.core.units import duration, in_bytes, per_second, shortened, three_digits
from anybatch.events.observer import (
    ClosingObserver,
    Level,
    Throughput,
    lines_of_start,
    message_of,
    read_number,
    skipped_line,
    step_of,
)

Numbers = Mapping[str, str]
"""Label -> number, as text on the screen."""
_STYLES: Final[Mapping[Level, str]] = {"plain": "", "result": "bold", "warning": "yellow", "error": "bold red"}
_GAP: Final = 3
_NUMBER_WIDTH: Final = 24
_LABEL_WIDTH: Final = _NUMBER_WIDTH - len(" -1.23e-100")


class SafeStream(io.TextIOBase):
    """Wraps a text stream so that a failed write never ends a run.

    Output to a closed terminal, a broken pipe or a full disk is dropped. Characters outside the encoding are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # (a plain attribute of TextIOBase, never set)
        """Name of the stream's encoding, such as "utf-8"."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write a text and flush it, or drop it."""
        if not self._is_lost:
            writable = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(writable)
                self._stream.flush()
            except (OSError, ValueError):  # a closed file raises ValueError
                self._is_lost = True
        # As if all of it had been written, so that callers do not retry.
        return len(text)

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False


def terminal_on(stream: TextIO) -> Terminal:
    """Return rich's console for a stream; it ignores FORCE_COLOR and notebooks, which would force terminal output."""
    safe = SafeStream(stream)
    file = cast("IO[str]", safe)
    is_terminal = safe.isatty()
    return Terminal(
        file=file, force_terminal=is_terminal, force_jupyter=False, highlight=False, markup=False, emoji=False
    )


class Console(ClosingObserver):
    """An observer that shows the progress of a run.

    On a terminal, it keeps a progress bar and the newest numbers at the bottom, and prints events above them:
    evaluations, diagnoses (warnings and notes of the engine), skipped steps, out-of-memory errors. Elsewhere (a pipe, a
    file, CI) it prints plain lines: the first and the last step, one step every few seconds, and events. It shows
    neither saved checkpoints nor the error of a failed run, which the caller reports.

    Only rank 0 is shown. Numbers are read from the device only when they are shown, at most four times a second, so the
    loop does not wait for the device in each step. The display changes only when a record arrives: there is no thread.

    Use it in a `with`, or let the run end (`Engine.close`), to restore the terminal.

    Args:
        total_steps: steps of the whole run, including those before a resume; None if unknown.
        terminal: where to print; None: standard error, so that standard output has only results.
        stop_requested: function that returns whether the user has asked to stop the run; shown on a terminal.
        clock: function that returns a monotonic time in seconds.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        terminal: Terminal | None = None,
        stop_requested: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._terminal = terminal_on(sys.stderr) if terminal is None else terminal
        self._has_bar = self._terminal.is_terminal and not self._terminal.is_dumb_terminal
        self._stop_requested = stop_requested if self._has_bar else None
        self._clock = clock
        self._lock = threading.Lock()  # backward hooks send records from other threads
        self._live: Live | None = None
        self._shows_cursor: Any = None
        self._pace = Throughput()
        self._num_steps = 0
        self._step: StepRecord | None = None
        self._micro_batch: MicroBatchRecord | None = None
        self._memory: MemoryRecord | None = None
        self._flags: list[tuple[int, Flag]] = []
        self._shown_seconds: float | None = None
        self._shown_steps: int | None = None

    def observe(self, record: Record, /) -> None:
        """Process a record, and update the display if it is due."""
        # One rank is enough, because all ranks report the same loss.
        if record.rank != 0:
            return
        with self._lock:
            if self._stop_requested is not None and self._stop_requested():
                self._stop_requested = None  # shown once
                again = "press Ctrl-C again to quit without saving"
                self._print(f"warning: stopping after this step and saving a checkpoint; {again}", "warning")
            self._process(record, self._clock())

    def close(self) -> None:
        """Keep the last bar, and restore the terminal. Closing twice is allowed."""
        with self._lock:
            self._end_live()

    def _process(self, record: Record, now: float) -> None:
        match record:
            case StepRecord():
                self._process_step(record, now)
            case MicroBatchRecord():
                self._micro_batch = record
                self._show_if_due(now, 0.25 if self._has_bar else 30.0)
            case MemoryRecord():
                self._memory = record
            case StartRecord():
                self._start(record, now)
            case EndRecord():
                self._end(record, now)
            case EvaluateRecord() | CheckpointRecord():
                self._pace.other_work(now)
                if isinstance(record, EvaluateRecord) or record.event != "saved":
                    self._print(*message_of(record, self._total_steps))
            case DiagnosisRecord(code="micro_batch_size"):
                return  # the next start record contains this decision
            case DiagnosisRecord() | OutOfMemoryRecord():
                self._print(*message_of(record, self._total_steps))

    def _start(self, record: StartRecord, now: float) -> None:
        """Begin a session: print its sizes and automatic choices, and draw the bar."""
        for line in lines_of_start(record):
            self._print(line)
        self._pace, self._num_steps = Throughput(), record.first_step
        self._step = self._micro_batch = self._memory = self._shown_steps = None
        self._pace.begin(now)
        if self._has_bar:
            self._show(now)
        self._shown_seconds = now

    def _process_step(self, record: StepRecord, now: float) -> None:
        self._pace.step(now, record.num_samples)
        is_first = self._step is None
        self._step, self._micro_batch, self._num_steps = record, None, record.step + 1
        # On an accelerator the flag is a tensor that may not be computed yet; it is read when numbers are shown.
        if record.skipped is not False:
            self._flags.append((record.step + 1, record.skipped))
        if is_first or self._num_steps == self._total_steps:
            self._show(now)
        else:
            self._show_if_due(now, 0.25 if self._has_bar else 5.0)

    def _end(self, record: EndRecord, now: float) -> None:
        # Show the last step even if it is not due, because users look for it.
        if self._shown_steps != self._num_steps and self._step is not None:
            self._show(now)
        self._end_live()
        if record.status != "failed":
            self._print(*message_of(record, self._total_steps, seconds=self._pace.seconds_since_begin(now)))

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
        if self._shows_cursor is not None:
            self._shows_cursor.detach()
        self._live = None

    def _print(self, line: str, level: Level = "plain") -> None:
        self._terminal.print(Text(line, style=_STYLES[level]), soft_wrap=True)

    def _show_if_due(self, now: float, seconds: float) -> None:
        if self._shown_seconds is None or now - self._shown_seconds >= seconds:
            self._show(now)

    def _show(self, now: float) -> None:
        """Read the newest numbers from the device, and show them."""
        flags, self._flags = self._flags, []
        skipped = [number for number, flag in flags if read_number(flag)]
        if skipped:
            self._print(skipped_line(skipped, self._total_steps), "warning")
        left = None if self._total_steps is None else self._pace.seconds_left(now, self._total_steps - self._num_steps)
        time_left = "-" if left is None else duration(left)
        numbers = self._numbers(now)
        if not self._has_bar:
            self._print(self._line(numbers, time_left))
        else:
            self._draw(numbers, time_left)
        # Not `now`: reading from a slow device takes time, and then every record would be due immediately.
        self._shown_seconds, self._shown_steps = self._clock(), self._num_steps

    def _line(self, numbers: Numbers, time_left: str) -> str:
        """Return the progress in one line; within a step, only its finished micro-batches and the remaining time."""
        if self._micro_batch is not None:
            numbers = {name: number for name, number in numbers.items() if name == "micro-batch"}
        else:
            numbers = {name: number for name, number in numbers.items() if name != "micro-batch"}
        cells = [f"{name} {number:>9}" for name, number in {**numbers, "left": time_left}.items()]
        return (" " * _GAP).join([step_of(self._num_steps, self._total_steps), *cells])

    def _draw(self, numbers: Numbers, time_left: str) -> None:
        """Draw the bar, and below it the numbers in columns."""
        bar = Table.grid(padding=(0, _GAP, 0, 0), expand=True)
        bar.add_column(no_wrap=True)
        heading = Text(step_of(self._num_steps, self._total_steps), style="bold")
        if self._total_steps is None:
            bar.add_row(heading)
        else:
            bar.add_column(ratio=1)
            bar.add_column(no_wrap=True)
            # A run without steps is complete.
            share = min(1.0, self._steps_done() / self._total_steps) if self._total_steps else 1.0
            progress = ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan")
            bar.add_row(heading, progress, f"{100 * share:>5.1f} %", f"{time_left:>11} left")
        if self._live is None:
            # rich prints redirected streams above the bar, so streams to a file or pipe must not be redirected.
            self._live = Live(
                console=self._terminal,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
                vertical_overflow="crop",
            )
            self._live.start()
            self._shows_cursor = weakref.finalize(self, self._live.stop)  # at exit, if nothing calls `close`
        cells = [
            Text.assemble((name, "dim"), f"{number:>{_NUMBER_WIDTH - len(name)}}", no_wrap=True, overflow="crop")
            for name, number in numbers.items()
        ]
        self._live.update(Group(bar, Columns(cells, padding=(0, _GAP), equal=True)), refresh=True)

    def _steps_done(self) -> float:
        """Return the number of finished steps, plus the finished fraction of the current step."""
        done, total = self._micro_batches()
        return self._num_steps + (done / total if self._micro_batch is not None else 0.0)

    def _micro_batches(self) -> tuple[int, int]:
        """Return how many micro-batches of the current (or else the last) step are finished, and how many it has."""
        if self._micro_batch is not None:
            return self._micro_batch.position + (self._micro_batch.event == "end"), self._micro_batch.num_micro_batches
        return (0, 0) if self._step is None else (self._step.num_micro_batches, self._step.num_micro_batches)

    def _numbers(self, now: float) -> Numbers:
        """Return the numbers to show; reading the step's numbers waits for the device."""
        numbers = {} if self._step is None else _numbers_of_step(self._step)
        numbers["samples/s"] = per_second(self._pace.samples_per_second)
        if self._memory is not None:
            numbers["memory"] = in_bytes(self._memory.peak_bytes, self._memory.limit_bytes)
        if self._step is not None:
            numbers["epoch"] = f"{self._step.epoch + (self._step.sample_offset > 0):,}"
        numbers["time"] = duration(self._pace.seconds_since_begin(now))
        done, total = self._micro_batches()
        if total > 1:
            numbers["micro-batch"] = f"{done:,} of {total:,}"
        return numbers


def _numbers_of_step(record: StepRecord) -> dict[str, str]:
    """Return the numbers of a step to show; reading them waits for the device."""
    numbers = {"loss": three_digits(read_number(record.loss))}
    if len(record.losses) > 1:
        for name, value in record.losses.items():
            numbers[shortened(name, _LABEL_WIDTH)] = three_digits(read_number(value))
    if record.gradient_norm is not None:
        numbers["gradient norm"] = three_digits(read_number(record.gradient_norm))
    # Parameter groups with different rates are shown as a range, because a list would not fit.
    rates = [read_number(rate) for rate in record.learning_rates]
    if len(set(rates)) == 1:
        numbers["learning rate"] = three_digits(rates[0])
    elif rates:
        known = [rate for rate in rates if rate is not None]
        numbers["highest rate"] = three_digits(max(known, default=None))
        numbers["lowest rate"] = three_digits(min(known, default=None))
    return numbers
