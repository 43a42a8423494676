"""A small file of what was measured, kept from one process to the next: one line of JSON each, never more than a hint.

Users can edit the file, so it is read as untrusted input: a damaged line is skipped, never an error.
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
"""A larger file is not read: a thousand lines take a tenth of it."""
JsonObject = dict[str, Any]


def cache_file(name: str) -> Path:
    """Return the path of a file in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("anybatch", appauthor=False)) / name


class JsonLinesFile:
    """The lines of a file. Whatever is wrong with it costs what was kept, and nothing else.

    Args:
        path: the file.

    Attributes:
        refused: why some or all of the file was passed over when it was last read; empty if nothing was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused = ""

    def read(self) -> list[JsonObject]:
        """Return the intact lines, the oldest first; damaged ones are dropped when the file is written next."""
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
            self.refused = f"{len(parsed) - len(found)} of its {len(parsed)} lines are no records"
        return found

    def write(self, lines: Iterable[JsonObject]) -> bool:
        """Keep these lines in the place of all others, the newest thousand; return whether that was possible."""
        text = [f"{json.dumps(line, sort_keys=True)}\n" for line in lines]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._replace("".join(text[-MOST_LINES:]))
        except OSError:
            return False
        return True

    def _text(self) -> str:
        """Return the file's text, or nothing with the reason in `refused`; a pipe is not waited for."""
        # Opening a pipe would block until another process writes; O_NONBLOCK returns at once, and it is refused below.
        # Windows lacks the first flag, and other systems the second one.
        number = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                self.refused = "it is no file"
                return ""
            with os.fdopen(number, "rb", closefd=False) as file:
                # One byte more than allowed shows that the file is too large, without reading all of it.
                content = file.read(MOST_BYTES + 1)
        finally:
            os.close(number)
        if len(content) > MOST_BYTES:
            self.refused = f"it is larger than {MOST_BYTES:,} bytes"
            return ""
        return content.decode()

    def _replace(self, text: str) -> None:
        """Write the file as a whole or not at all: who reads it meanwhile sees the old one or the new one."""
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(self.path)
        # Also for KeyboardInterrupt: the temporary file must not stay.
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise


def plain(value: object) -> Any:  # noqa: ANN401 (what JSON makes of it)
    """Return a value as it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(value))


def _parsed(line: str) -> JsonObject | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # brackets within brackets, a thousand deep
        return None
    return found if isinstance(found, dict) else None
