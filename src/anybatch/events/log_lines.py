"""The lines of a log as bytes: what one is, and those that come while a run writes. Without torch, which takes seconds.

Whoever writes a log may have been killed, may still be writing, or may have meant harm: a line is data until it is
known to be a line, and an unfinished one waits.
"""

import json
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
MOST_LINE_BYTES = 1 << 20
"""Longer lines are left out by `LogTail`: no record is so long, and whoever reads must not hold it."""

JsonLine = dict[str, Any]
_HEAD_BYTES = 1 << 12


def decoded_line(text: bytes) -> JsonLine | None:
    """Return a line of a version that is known; None for anything else."""
    line = decoded_object(text)
    return line if line is not None and line.get("version") == SCHEMA_VERSION else None


def decoded_object(text: bytes) -> JsonLine | None:
    """Return the JSON object that a text is; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not even text, or made to hurt
        return None
    return value if isinstance(value, dict) else None


class LogTail:
    """The lines of a log, each once, as they come. A file that is not there yet, or is no file, has none.

    A log only grows, so what was read is not read again, until another file stands in its place: one that is shorter,
    or begins otherwise. Then it is read from its beginning, and `generation` says so.

    Args:
        path: of the log.

    Attributes:
        path: of the log.
        offset: bytes that were read, up to the end of a line.
        size: bytes of the file, when it was last looked at.
        written_seconds: when it was last written, in seconds since 1970.
        generation: how often it was read from its beginning.
        num_too_long: lines that were left out.
    """

    def __init__(self, path: Path) -> None:
        """Remember the path; nothing is opened."""
        self.path = path
        self.offset = self.size = self.generation = self.num_too_long = 0
        self.written_seconds = 0.0
        self._head = b""
        self._inside_too_long = False

    @property
    def is_behind(self) -> bool:
        """Whether the file was longer, when it was last looked at, than what was read."""
        return self.offset < self.size

    def read(self, most_bytes: int) -> list[bytes]:
        """Return the whole lines that have come, without their ends.

        Args:
            most_bytes: to read at once, at least `MOST_LINE_BYTES`.

        Raises:
            OSError: it is there, and cannot be read.
        """
        assert most_bytes >= MOST_LINE_BYTES, "a line that is allowed has to fit"
        if not self.path.is_file():  # opening a pipe would wait for somebody to write
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.size, self.written_seconds = status.st_size, status.st_mtime
            head = file.read(_HEAD_BYTES)
            self._begin_again_if_replaced(head)
            file.seek(self.offset)
            lines = self._whole_lines(file.read(most_bytes))
        # Only what was read stays as it is: an unfinished last line is removed by the run that goes on.
        self._head = head[: self.offset]
        return lines

    def _begin_again_if_replaced(self, head: bytes) -> None:
        if self.size < self.offset or not head.startswith(self._head):
            self.offset = self.num_too_long = 0
            self._inside_too_long = False
            self.generation += 1

    def _whole_lines(self, block: bytes) -> list[bytes]:
        end = block.rfind(b"\n") + 1
        if not end:
            if self._inside_too_long or len(block) > MOST_LINE_BYTES:
                self.num_too_long += not self._inside_too_long
                self._inside_too_long = True
                self.offset += len(block)
            return []
        self.offset += end
        lines = block[: end - 1].split(b"\n")
        if self._inside_too_long:
            self._inside_too_long = False
            del lines[0]
        allowed = [line for line in lines if len(line) <= MOST_LINE_BYTES]
        self.num_too_long += len(lines) - len(allowed)
        return allowed
