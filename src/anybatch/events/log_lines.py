"""The lines of a log as bytes, also while a run writes them. Does not import torch, which takes seconds.

The writer may have been killed, may still be writing, or may be malicious: every line is validated, and an unfinished
one waits.
"""

import json
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
MOST_LINE_BYTES = 1 << 20
"""`LogTail` skips longer lines, so that a reader need not hold them in memory; no record is this long."""

JsonLine = dict[str, Any]
_HEAD_BYTES = 1 << 12


def decoded_line(text: bytes) -> JsonLine | None:
    """Return a line of a known version, else None."""
    line = decoded_object(text)
    return line if line is not None and line.get("version") == SCHEMA_VERSION else None


def decoded_object(text: bytes) -> JsonLine | None:
    """Return the JSON object in a text, else None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not text, or malicious
        return None
    return value if isinstance(value, dict) else None


class LogTail:
    """New lines of a log, each once. A missing file, or a path that is not a file, has none.

    A log only grows, so only new bytes are read. If another file replaces it (shorter, or with another beginning), it
    is read from the start, and `generation` increases.

    Attributes:
        offset: bytes read, up to the end of a line.
        size: size of the file at the last read, in bytes.
        written_seconds: last modification, in seconds since 1970.
        generation: how often the file was read from its start.
        num_too_long: number of skipped lines.
    """

    def __init__(self, path: Path) -> None:
        """Store the path without opening it."""
        self.path = path
        self.offset = self.size = self.generation = self.num_too_long = 0
        self.written_seconds = 0.0
        self._head = b""
        self._inside_too_long = False

    @property
    def has_unread_bytes(self) -> bool:
        """Whether the file had unread bytes at the last read."""
        return self.offset < self.size

    def read(self, most_bytes: int) -> list[bytes]:
        """Return new complete lines without their ends, from at most `most_bytes` (at least `MOST_LINE_BYTES`)."""
        assert most_bytes >= MOST_LINE_BYTES, "a line that is allowed has to fit"
        if not self.path.is_file():  # opening a pipe would block
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.size, self.written_seconds = status.st_size, status.st_mtime
            head = file.read(_HEAD_BYTES)
            self._begin_again_if_replaced(head)
            file.seek(self.offset)
            lines = self._whole_lines(file.read(most_bytes))
        # An unfinished last line may be removed by a resumed run, so it is not counted as read.
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
