"""A run on a screen: a bar and the newest numbers at the bottom of a terminal, plain lines elsewhere."""

import io
import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
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

from anybatch.events.messages import Level, step_of

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

    Attributes:
        num_steps: steps made since the start of the run.
        total_steps: steps of the whole run; None if unknown.
        share_of_step: completed part of the next step, from 0 to 1.
        is_within_step: whether the next step has begun.
        time_left: remaining time as text; None if unknown.
        cells: the current numbers.
        underway: progress within the step, such as `micro-batch 3 of 16`; None if it has one micro-batch.
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

    Attributes:
        has_bar: whether the terminal can move its cursor; if not, progress is printed in lines.
        seconds_per_step: minimum seconds between updates after steps.
        seconds_per_micro_batch: minimum seconds between updates within a step.
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
