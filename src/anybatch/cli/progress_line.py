"""The progress of a measuring command: one line of the terminal, overwritten."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_WIDTH: Final = 79


@contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """Yield a function that overwrites the line, from any process; clear the line at the end.

    Yields None if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    try:
        yield _write
    finally:
        _write("")


def _write(words: str) -> None:
    # Standard output is for the report.
    sys.stderr.write(f"\r{words[:_WIDTH]:<{_WIDTH}}\r")
    sys.stderr.flush()
