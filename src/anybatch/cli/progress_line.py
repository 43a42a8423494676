"""What a verb that measures for a minute says meanwhile: one line of the terminal, over itself."""

import sys
from typing import Final

_WIDTH: Final = 79


def say_on_one_line(words: str) -> None:
    """Write over the last line of the terminal; nothing clears it. It goes to the error stream, beside the report."""
    sys.stderr.write(f"\r{words[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
