"""Draw docs/console.svg, a terminal in the middle of a real run: `python docs/draw_console.py`."""  # noqa: INP001 (a script)

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console as Terminal
from rich.terminal_theme import TerminalTheme

from anybatch.events.console import Console
from anybatch.events.moment import Level, Moment
from anybatch.events.terminal_screen import Frame, TerminalScreen
from anybatch.recipes.digits import digits
from anybatch.recipes.session import train
from anybatch.recipes.settings import Choices

OUT = Path(__file__).with_name("console.svg")
WIDTH = 104
LAST_STEP, LAST_SHARE = 33, 0.5
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEME = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [
        *((72, 79, 88), (255, 123, 114), (126, 231, 135), (227, 179, 65)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)),
    ],
)


class Picture:
    """A screen that stands still at one moment of a run.

    Args:
        terminal: records what is printed to it.
    """

    seconds_per_step = 0.0
    seconds_per_micro_batch = 0.0
    shows_beginning = True

    def __init__(self, terminal: Terminal) -> None:
        self.is_done = False
        self._terminal = terminal
        self._screen = TerminalScreen(terminal)

    def say(self, line: str, level: Level, /) -> None:
        """Print a line."""
        if not self.is_done:
            self._screen.say(line, level)

    def show(self, moment: Moment, /) -> None:
        """Draw the one moment, and nothing from then on."""
        if not self.is_done and (moment.num_steps, moment.share_of_step) >= (LAST_STEP, LAST_SHARE):
            self.is_done = True
            self._terminal.print(Frame(moment))

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Train for a while and draw what was seen."""
    terminal = Terminal(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    picture = Picture(terminal)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        train(
            digits(),
            Path("runs", "digits"),
            Choices(effective_batch_size=256, micro_batch_size=32, epochs=10),
            observer=lambda outlook: Console(outlook.num_steps, screen=picture),
            stop=lambda: picture.is_done,
        )
    svg = terminal.export_svg(title="anybatch train digits", theme=THEME, unique_id="console")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts that would be fetched from elsewhere
    OUT.write_text(re.sub(r"font-family: *[^;]+;", f"font-family: {FONTS};", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
