"""A run on a terminal: a bar and the newest numbers at the bottom, events above them."""

import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, cast

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from anybatch.events.safe_stream import SafeStream
from anybatch.events.screen import CELL_WIDTH, Level, ScreenCell, ScreenContents

_GAP = "   "
_INDENT, _BAR_STYLE = "    ", "cyan"
_LEAST_BAR_WIDTH, _LEAST_LINE_WIDTH = 10, 20
_STYLES: Mapping[Level, str] = MappingProxyType(
    {"plain": "", "result": "bold", "warning": "yellow", "error": "bold red"}
)


class TerminalScreen:
    """Draws on a terminal with rich, which handles colours, width and NO_COLOR.

    While it draws, other output to a terminal appears above the bar, until `close` or the end of the program.
    """

    seconds_per_step = 0.25
    seconds_per_micro_batch = 0.25
    shows_beginning = True

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._live: Live | None = None
        self._restore: weakref.finalize[[], TerminalScreen] | None = None

    def say(self, line: str, level: Level, /) -> None:
        """Print a line above the bar."""
        width = max(_LEAST_LINE_WIDTH, self._terminal.width)
        lines = textwrap.wrap(
            line, width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
        )  # paths are not wrapped, so that they can be copied
        self._terminal.print(Text("\n".join(lines), style=_STYLES[level]), soft_wrap=True)

    def show(self, moment: ScreenContents, /) -> None:
        """Draw the bar and the numbers."""
        if self._live is None:
            self._live = self._begin()
        self._live.update(Frame(moment), refresh=True)

    def close(self) -> None:
        """Keep the last bar, and restore the terminal."""
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


class Frame:
    """A moment as rich draws it: the bar on one line, and below it the numbers, in columns that fit."""

    def __init__(self, moment: ScreenContents) -> None:
        self._moment = moment

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        """Yield the lines for the current width."""
        yield from self._bar_line(console, options)
        underway = [] if self._moment.underway is None else [self._moment.underway]
        yield from _rows([*self._moment.cells, *underway], options.max_width)

    def _bar_line(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        moment, share = self._moment, self._moment.share
        heading = Text(moment.heading, style="bold", no_wrap=True, overflow="ellipsis")
        if share is None:
            yield heading
            return
        percent = f"{100 * share:>5.1f} %"
        left = f"{moment.time_left or '-':>11} left"
        # On a narrow terminal the percentage is dropped first, then the time, and last the bar.
        ends = next(
            (end for end in (f"{percent}{_GAP}{left}", left) if _room(heading, end, options) >= _LEAST_BAR_WIDTH), ""
        )
        line = heading
        room = _room(heading, ends, options)
        if room >= _LEAST_BAR_WIDTH:
            bar = ProgressBar(
                total=1.0, completed=share, width=room, complete_style=_BAR_STYLE, finished_style=_BAR_STYLE
            )
            line = Text.assemble(heading, _GAP, *_drawn(bar, console, options), f"{_GAP}{ends}".rstrip())
        line.no_wrap, line.overflow = True, "crop"
        yield line


def is_capable(stream: SafeStream) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and not _terminal(stream).is_dumb_terminal


def make_terminal_screen(stream: SafeStream) -> TerminalScreen:
    """Return a screen that draws on a terminal."""
    return TerminalScreen(_terminal(stream))


def _terminal(stream: SafeStream) -> Terminal:
    return Terminal(file=cast("IO[str]", stream), highlight=False, markup=False, emoji=False)


def _room(heading: Text, end: str, options: ConsoleOptions) -> int:
    """Return the characters available for the bar."""
    gaps = len(_GAP) * (2 if end else 1)
    return options.max_width - heading.cell_len - len(end) - gaps


def _drawn(bar: ProgressBar, console: Terminal, options: ConsoleOptions) -> Sequence[tuple[str, str]]:
    """Return a bar as pieces of text, so that it fits into a line."""
    pieces = [(segment.text, str(segment.style or "")) for segment in console.render(bar, options)]
    drawn = sum(len(text) for text, _ in pieces)
    assert bar.width is not None
    return [*pieces, (" " * (bar.width - drawn), "")]  # without colours only the finished part is drawn


def _rows(cells: Sequence[ScreenCell], width: int) -> Sequence[Text]:
    """Return cells in columns, in rows of about equal length."""
    # The last column needs no gap after it, hence the gap on both sides of the division.
    fitting = max(1, (width + len(_GAP)) // (CELL_WIDTH + len(_GAP)))
    num_rows = -(-len(cells) // fitting)
    # As few rows as possible, evenly filled: seven cells in two rows are 4 and 3, not 6 and 1.
    num_columns = -(-len(cells) // max(1, num_rows))
    rows = [cells[start : start + num_columns] for start in range(0, len(cells), max(1, num_columns))]
    return [
        Text(_GAP, no_wrap=True, overflow="crop").join(_drawn_cell(cell, min(CELL_WIDTH, width)) for cell in row)
        for row in rows
    ]


def _drawn_cell(cell: ScreenCell, width: int) -> Text:
    return Text.assemble((cell.label, "dim"), " ", cell.value.rjust(width - len(cell.label) - 1))
