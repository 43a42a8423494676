"""A small cache file for measurements, with one line of JSON each.

Users can edit the file, so it is untrusted input: damaged lines are skipped, never an error.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs

MOST_LINES = 1000
MOST_BYTES = 4 * 2**20
"""Larger files are not read; a thousand lines need a tenth of this."""
JsonObject = dict[str, Any]


def cache_file(name: str) -> Path:
    """Return the path of a file in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("anybatch", appauthor=False)) / name


class JsonLinesFile:
    """The lines of a file; a damaged file loses its contents but raises no error.

    Args:
        path: the file.

    Attributes:
        refused: why the last read skipped some or all lines; empty if it skipped nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused = ""

    def read(self) -> list[JsonObject]:
        """Return the intact lines, the oldest first; the next write drops damaged ones."""
        self.refused = ""
        try:
            text = self._text()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            self.refused = f"it cannot be read ({type(error).__name__})"
            return []
        if self.refused:
            return []
        parsed = [_parsed(line) for line in text.splitlines()]
        found = [line for line in parsed if line is not None]
        if len(found) < len(parsed):
            self.refused = f"{len(parsed) - len(found)} of its {len(parsed)} lines are not records"
        return found

    def write(self, lines: Iterable[JsonObject]) -> bool:
        """Replace the contents with these lines, at most the last thousand; return whether that succeeded."""
        text = [f"{json.dumps(line, sort_keys=True)}\n" for line in lines]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace("".join(text[-MOST_LINES:]))
        except OSError:
            return False
        return True

    def _text(self) -> str:
        """Return the file's text, or an empty text with the reason in `refused`."""
        # Opening a pipe would block until another process writes; with O_NONBLOCK it opens and is refused below.
        # Windows lacks O_NONBLOCK, other systems lack O_BINARY.
        number = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                self.refused = "it is not a regular file"
                return ""
            with os.fdopen(number, "rb", closefd=False) as file:
                # One byte more than allowed is enough to detect a file that is too large.
                content = file.read(MOST_BYTES + 1)
        finally:
            os.close(number)
        if len(content) > MOST_BYTES:
            self.refused = f"it is larger than {MOST_BYTES:,} bytes"
            return ""
        return content.decode()

    def _replace(self, text: str) -> None:
        """Write the file atomically: other processes read the old or the new contents."""
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        # Remove the temporary file also after KeyboardInterrupt.
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise


def plain(value: object) -> Any:  # noqa: ANN401 (any JSON value)
    """Return a value as read back from a file, with tuples as lists."""
    return json.loads(json.dumps(value))


def _parsed(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: a thousand nested brackets
        return None
    return found if isinstance(found, dict) else None
