"""Draw docs/console.svg, a terminal after a real run: `python docs/draw_console.py`."""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from rich.console import Console as Terminal
from rich.terminal_theme import TerminalTheme

from anybatch.cli.launch import ConsoleFilter, place_of, summary
from anybatch.core.run_config import RunConfig
from anybatch.events.console import Console, Screen, ScreenContents
from anybatch.recipes.digits import digits
from anybatch.recipes.session import SessionStart, train

OUT = Path(__file__).with_name("console.svg")
WIDTH = 104
NUM_EPOCHS, MICRO_BATCH_SIZE = 8, 32
COMMAND = f"anybatch train digits --epochs {NUM_EPOCHS} --micro-batch-size {MICRO_BATCH_SIZE} --out runs/digits"
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
THEME = TerminalTheme(
    (22, 27, 34),
    (201, 209, 217),
    [
        *((72, 79, 88), (255, 123, 114), (126, 231, 135), (227, 179, 65)),
        *((88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196)),
    ],
)


class Picture(Screen):
    """A screen that draws the last moment of a run only, as a terminal keeps it.

    Args:
        terminal: records what is printed to it.
    """

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self.seconds_per_step = self.seconds_per_micro_batch = 0.0
        self._last: ScreenContents | None = None

    def show(self, moment: ScreenContents, /) -> None:
        """Keep a moment."""
        self._last = moment

    def close(self) -> None:
        """Draw the last moment."""
        if self._last is not None:
            self._terminal.print(self._last)
        self._last = None


def main() -> None:
    """Train for a while and draw what a terminal shows at the end."""
    terminal = Terminal(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    terminal.print(f"$ {COMMAND}", style="bold", highlight=False)

    def begin(session: SessionStart) -> ConsoleFilter:
        terminal.print(place_of(session), highlight=False)
        return ConsoleFilter(Console(session.num_steps, screen=Picture(terminal)))

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        choices = RunConfig(epochs=NUM_EPOCHS, micro_batch_size=MICRO_BATCH_SIZE)
        outcome = train(digits(), Path("runs", "digits"), choices, observer=begin)
        terminal.print(summary(outcome, tensorboard=""), end="", highlight=False, soft_wrap=True)
    svg = terminal.export_svg(title="anybatch train digits", theme=THEME, unique_id="console")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts that would be fetched from elsewhere
    OUT.write_text(re.sub(r"font-family: *[^;]+;", f"font-family: {FONTS};", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
