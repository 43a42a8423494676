"""Draw docs/console.svg, a terminal after a real run: `python docs/draw_console.py`."""

import contextlib
import io
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

from rich.console import Console as Terminal
from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from anybatch.cli.launch import describe_files, summary
from anybatch.core.run_config import RunConfig
from anybatch.events.console import Console
from anybatch.recipes.digits import digits
from anybatch.recipes.run_folder import RunFolder
from anybatch.recipes.session import train

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


class LastFrame:
    """Replaces rich's `Live`: prints only the last frame, which stays on a real terminal."""

    def __init__(self, *, console: Terminal, **_: object) -> None:
        self._terminal = console
        self._last: RenderableType = ""

    def start(self) -> None:
        """Do nothing."""

    def update(self, frame: RenderableType, **_: object) -> None:
        """Keep a frame."""
        self._last = frame

    def stop(self) -> None:
        """Draw the last frame."""
        self._terminal.print(self._last)


def main() -> None:
    """Train for some epochs, and draw the terminal at the end."""
    terminal = Terminal(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    terminal.print(f"$ {COMMAND}", style="bold", highlight=False)

    def begin(folder: RunFolder, num_steps: int | None) -> Console:
        terminal.print(describe_files(folder), highlight=False)
        return Console(num_steps, terminal=terminal)

    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        patch("anybatch.events.console.Live", LastFrame),
    ):
        choices = RunConfig(epochs=NUM_EPOCHS, micro_batch_size=MICRO_BATCH_SIZE)
        outcome = train(digits(), Path("runs", "digits"), choices, observer=begin)
        terminal.print(summary(outcome, tensorboard=""), end="", highlight=False, soft_wrap=True)
    svg = terminal.export_svg(title="anybatch train digits", theme=THEME, unique_id="console")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # the SVG must not load fonts from other sites
    OUT.write_text(re.sub(r"font-family: *[^;]+;", f"font-family: {FONTS};", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
