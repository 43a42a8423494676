"""What a verb that measures for a minute says meanwhile: one line of the terminal, over itself."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_WIDTH: Final = 79


@contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a function (words) that writes them over the last line, also from another process; clear it at the end.

    None where the error stream is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _write
    finally:
        _write("")


def _write(words: str) -> None:
    # To the error stream, beside the report.
    sys.stderr.write(f"\r{words[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
