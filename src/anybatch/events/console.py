"""Shows a run to a person: a progress bar on a terminal, plain lines elsewhere."""

import io
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, TextIO, cast

from rich.columns import Columns
from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
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
    PhaseRecord,
    Record,
    ReductionRecord,
    Scalar,
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

CELL_WIDTH = 24
"""Maximum characters of a label, a space and its value."""
_GAP = "   "
_INDENT, _BAR_STYLE = "    ", "cyan"
_LEAST_BAR_WIDTH, _LEAST_LINE_WIDTH = 10, 20
_STYLES: Mapping[Level, str] = MappingProxyType(
    {"plain": "", "result": "bold", "warning": "yellow", "error": "bold red"}
)


@dataclass(frozen=True, slots=True)
class ScreenCell:
    """A number with its label; `value_width` keeps columns from moving when the value changes."""

    label: str
    value: str
    value_width: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenContents:
    """The contents of a screen at one moment, as host values and text.

    `share_of_step` is the completed part of the next step, from 0 to 1, and `underway` is the progress within it, such
    as `micro-batch 3 of 16`; None if it has one micro-batch. A total or remaining time is None if unknown.
    """

    num_steps: int
    total_steps: int | None
    share_of_step: float
    is_within_step: bool
    time_left: str | None
    cells: Sequence[ScreenCell]
    underway: ScreenCell | None

    @property
    def heading(self) -> str:
        """`step 1,234 of 5,000`, with a constant width."""
        return step_of(self.num_steps, self.total_steps)

    @property
    def share(self) -> float | None:
        """Completed part of the run, from 0 to 1; None if its length is unknown."""
        if self.total_steps is None:
            return None
        # A run without steps is complete.
        return min(1.0, (self.num_steps + self.share_of_step) / self.total_steps) if self.total_steps else 1.0

    @property
    def line(self) -> str:
        """The contents in one line, for a stream that is not a terminal."""
        within = self.is_within_step and self.underway is not None
        cells = [cell for cell in ([self.underway] if within else self.cells) if cell is not None]
        if self.time_left is not None:
            cells.append(ScreenCell("left", self.time_left, 11))
        return _GAP.join([self.heading, *(f"{cell.label} {cell.value:>{cell.value_width}}" for cell in cells)]).rstrip()

    def __rich_console__(self, _console: Terminal, options: ConsoleOptions) -> RenderResult:
        """Yield the bar on one line, and below it the numbers, in columns that fit."""
        yield self._bar(options.max_width)
        width = min(CELL_WIDTH, options.max_width)
        cells = [*self.cells, *([] if self.underway is None else [self.underway])]
        yield Columns([_drawn_cell(cell, width) for cell in cells], padding=(0, len(_GAP)), equal=True)

    def _bar(self, width: int) -> Table | Text:
        """Return the first line; on a narrow terminal without the percentage, then without the time, then the bar."""
        heading, share = Text(self.heading, style="bold", no_wrap=True, overflow="crop"), self.share
        if share is None:
            return heading
        percent, left = f"{100 * share:>5.1f} %", f"{self.time_left or '-':>11} left"
        for ends in ([percent, left], [left], []):
            room = width - len(_GAP.join([self.heading, "", *ends]))
            if room >= _LEAST_BAR_WIDTH:
                bar = ProgressBar(1.0, share, room, complete_style=_BAR_STYLE, finished_style=_BAR_STYLE)
                line = Table.grid(padding=(0, len(_GAP), 0, 0))
                line.add_row(heading, bar, *ends)
                return line
        return heading


class Screen:
    """Shows a run with rich, which handles colours, width and NO_COLOR. The console decides what to show and when.

    While the bar is drawn, other output to a terminal appears above it, until `close` or the end of the program.

    `has_bar` is whether the terminal can move its cursor; if not, progress is printed in lines. `seconds_per_step` and
    `seconds_per_micro_batch` are the minimum seconds between updates.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.has_bar = terminal.is_terminal and not terminal.is_dumb_terminal
        self.seconds_per_step, self.seconds_per_micro_batch = (0.25, 0.25) if self.has_bar else (5.0, 30.0)
        self._live: Live | None = None
        self._restore: weakref.finalize[[], Screen] | None = None

    def say(self, line: str, level: Level, /) -> None:
        """Print a permanent line."""
        if self.has_bar:
            width = max(_LEAST_LINE_WIDTH, self._terminal.width)
            # paths are not wrapped, so that they can be copied
            lines = textwrap.wrap(
                line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
            )
            line = "\n".join(lines)
        self._terminal.print(Text(line, style=_STYLES[level]), soft_wrap=True)

    def show(self, moment: ScreenContents, /) -> None:
        """Show the progress of the run."""
        if not self.has_bar:
            self.say(moment.line, "plain")
            return
        if self._live is None:
            self._live = self._begin()
        self._live.update(moment, refresh=True)

    def close(self) -> None:
        """Keep the last bar, and restore the terminal. Later output starts over."""
        if self._restore is not None:
            self._restore()
        self._live = self._restore = None

    def _begin(self) -> Live:
        live = Live(
            console=self._terminal,
            auto_refresh=False,
            # rich would print redirected output above the bar, but it belongs into its file.
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe is not redirected
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )
        live.start()
        self._restore = weakref.finalize(self, live.stop)  # also restores the cursor after an error
        return live


class SafeStream(io.TextIOBase):
    """Wraps a text stream for output that no result depends on.

    Output to a closed terminal, a broken pipe or a full disk is dropped. Characters outside the encoding are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # (a plain attribute there, never set)
        """Name of the encoding in which characters are written."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write a text and flush it, or drop it."""
        if not self._is_lost:
            # A name with a character outside the encoding is escaped instead of ending the run.
            writable = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(writable)
                self._stream.flush()
            except (OSError, ValueError):  # a closed file raises ValueError
                self._is_lost = True
        # The caller must not notice dropped text.
        return len(text)

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the number of the file."""
        return self._stream.fileno()


def screen_for(stream: TextIO) -> Screen:
    """Return a screen on a stream: with a bar only if it is a terminal, regardless of FORCE_COLOR and notebooks."""
    safe = SafeStream(stream)
    return Screen(
        Terminal(
            file=cast("IO[str]", safe),
            force_terminal=safe.isatty(),
            force_jupyter=False,
            highlight=False,
            markup=False,
            emoji=False,
        )
    )


def _drawn_cell(cell: ScreenCell, width: int) -> Text:
    drawn = Text.assemble((cell.label, "dim"), " ", cell.value.rjust(width - len(cell.label) - 1))
    drawn.no_wrap, drawn.overflow = True, "crop"
    return drawn


_LABEL_WIDTH = CELL_WIDTH - len(" -1.23e-100")


class Console(ClosingObserver):
    """An observer that shows a run to a person.

    On a terminal it keeps a progress bar and the newest numbers at the bottom, and prints events above them:
    evaluations, checkpoints, diagnoses, skipped steps, out of memory. Elsewhere (a pipe, a file, CI) it prints plain
    lines: the first and the last step, one every few seconds between them, and events.

    Only rank 0 is shown. Numbers are read from their device only when they are shown, at most four times a second, so
    the loop does not wait for the device in each step. It has no thread: the display changes when a record arrives. A
    closed terminal does not end the run.

    Use it in a `with`, or let the run end (`Engine.close`), to restore the terminal.

    Args:
        total_steps: steps of the whole run, including those before a resume; None if unknown.
        stream: output; None: standard error, which keeps standard output for results.
        screen: how to draw; None: by the stream, a terminal's or the plain one.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        stream: TextIO | None = None,
        screen: Screen | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._screen = screen_for(sys.stderr if stream is None else stream) if screen is None else screen
        self._clock = clock
        self._lock = threading.Lock()  # backward hooks send records from other threads
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
        # Every rank has the same loss, so one is enough; reductions and phases are for the log.
        if record.rank != 0 or isinstance(record, ReductionRecord | PhaseRecord):
            return
        with self._lock:
            self._take(record, self._clock())

    def close(self) -> None:
        """Restore the terminal. Closing twice is allowed."""
        with self._lock:
            self._screen.close()

    def _take(self, record: Record, now: float) -> None:
        match record:
            case StepRecord():
                self._take_step(record, now)
            case MicroBatchRecord():
                self._micro_batch = record
                self._show_if_due(now, self._screen.seconds_per_micro_batch)
            case MemoryRecord():
                self._memory = record
            case StartRecord():
                self._start(record, now)
            case EndRecord():
                self._end(record, now)
            case EvaluateRecord() | CheckpointRecord():
                self._pace.aside(now)
                self._say(record)
            # The size search reports it, and the decisions at the start repeat it; show it once.
            case DiagnosisRecord(code="micro_batch_size"):
                return  # the next start record has it among its decisions
            case DiagnosisRecord() | OutOfMemoryRecord():
                self._say(record)
            case _:  # an unknown kind
                return

    def _start(self, record: StartRecord, now: float) -> None:
        """Begin a session: print the split and the decisions, and draw the bar at its first step."""
        for line in lines_of_start(record):
            self._screen.say(line, "plain")
        self._pace, self._num_steps = Throughput(), record.first_step
        self._step = self._micro_batch = self._memory = self._shown_steps = None
        self._pace.begin(now)
        if self._screen.has_bar:
            self._show(now)
        self._shown_seconds = now

    def _take_step(self, record: StepRecord, now: float) -> None:
        self._pace.step(now, record.num_samples)
        is_first = self._step is None
        self._step, self._micro_batch, self._num_steps = record, None, record.step + 1
        # On an accelerator the flag is a tensor that may not be computed yet; it is read when numbers are shown.
        if record.skipped is not False:
            self._flags.append((record.step + 1, record.skipped))
        if is_first or self._num_steps == self._total_steps:
            self._show(now)
        else:
            self._show_if_due(now, self._screen.seconds_per_step)

    def _end(self, record: EndRecord, now: float) -> None:
        # The last step is often not due when the run ends, but users look for it.
        if self._shown_steps != self._num_steps and self._step is not None:
            self._show(now)
        self._screen.close()
        self._say(record, seconds=self._pace.seconds_since_begin(now))

    def _say(self, record: Record, *, seconds: float | None = None) -> None:
        line, level = message_of(record, self._total_steps, seconds=seconds)
        self._screen.say(line, level)

    def _show_if_due(self, now: float, seconds: float) -> None:
        if self._shown_seconds is None or now - self._shown_seconds >= seconds:
            self._show(now)

    def _show(self, now: float) -> None:
        """Read the pending numbers, and show them."""
        flags, self._flags = self._flags, []
        skipped = [number for number, flag in flags if read_number(flag)]
        if skipped:
            self._screen.say(skipped_line(skipped, self._total_steps), "warning")
        self._screen.show(self._moment(now))
        # The clock is read again: otherwise a slow device would make every record due immediately.
        self._shown_seconds, self._shown_steps = self._clock(), self._num_steps  # reading may have waited

    def _moment(self, now: float) -> ScreenContents:
        total = self._total_steps
        left = None if total is None else self._pace.seconds_left(now, max(0, total - self._num_steps))
        num_done, num_micro_batches = self._micro_batches()
        within = self._micro_batch is not None
        return ScreenContents(
            num_steps=self._num_steps,
            total_steps=total,
            share_of_step=num_done / num_micro_batches if within else 0.0,
            is_within_step=within,
            time_left=None if left is None else duration(left),
            cells=self._cells(now),
            underway=ScreenCell("micro-batch", f"{num_done:,} of {num_micro_batches:,}", 10)
            if num_micro_batches > 1
            else None,
        )

    def _micro_batches(self) -> tuple[int, int]:
        """Return how many micro-batches of this (or the last) step are done, and their total."""
        if self._micro_batch is not None:
            return self._micro_batch.position + (self._micro_batch.event == "end"), self._micro_batch.num_micro_batches
        return (0, 0) if self._step is None else (self._step.num_micro_batches, self._step.num_micro_batches)

    def _cells(self, now: float) -> list[ScreenCell]:
        cells = [] if self._step is None else _cells_of_step(self._step)
        cells.append(ScreenCell("samples/s", per_second(self._pace.samples_per_second)))
        if self._memory is not None:
            limit = self._memory.limit_bytes
            cells.append(ScreenCell("memory", in_bytes(self._memory.peak_bytes, limit), 8 if limit is None else 16))
        if self._step is not None:
            cells.append(ScreenCell("epoch", f"{self._step.epoch + (self._step.sample_offset > 0):,}", 3))
        cells.append(ScreenCell("time", duration(self._pace.seconds_since_begin(now)), 11))
        return cells


def _cells_of_step(record: StepRecord) -> list[ScreenCell]:
    """Return the numbers of a step, waiting for its device."""
    cells = [ScreenCell("loss", three_digits(read_number(record.loss)))]
    if len(record.losses) > 1:
        terms: Mapping[str, Scalar] = record.losses
        cells += [
            ScreenCell(shortened(name, _LABEL_WIDTH), three_digits(read_number(value))) for name, value in terms.items()
        ]
    if record.gradient_norm is not None:
        cells.append(ScreenCell("gradient norm", three_digits(read_number(record.gradient_norm))))
    # Parameter groups usually share a rate; otherwise a range is shown, because a list would not fit.
    rates = [read_number(rate) for rate in record.learning_rates]
    if len(set(rates)) == 1:
        cells.append(ScreenCell("learning rate", three_digits(rates[0])))
    elif rates:
        known = [rate for rate in rates if rate is not None]
        cells.append(ScreenCell("highest rate", three_digits(max(known, default=None))))
        cells.append(ScreenCell("lowest rate", three_digits(min(known, default=None))))
    return cells
