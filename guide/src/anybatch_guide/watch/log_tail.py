"""`LogTail`: the new lines of a log while a run writes it, as bytes."""

import os
from pathlib import Path

MAX_LINE_BYTES = 1 << 20
"""`LogTail` skips longer lines, so that they need no memory; no record is this long."""

_HEAD_BYTES = 1 << 12


class LogTail:
    """Reads each line of a growing log once. A path that is not a file has no lines.

    Only new bytes are read. If the log becomes shorter or starts differently, another file has replaced it: it is then
    read from the start, and `generation` increases.

    `offset` is the number of bytes read, up to the end of a line; `written_seconds` is the last modification, in
    seconds since 1970; `num_too_long` counts skipped lines.
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

    def read(self, max_bytes: int) -> list[bytes]:
        """Return new complete lines without their ends, from at most `max_bytes` (at least `MAX_LINE_BYTES`)."""
        assert max_bytes >= MAX_LINE_BYTES, "max_bytes must fit the longest line"
        if not self.path.is_file():  # opening a pipe would block
            return []
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.size, self.written_seconds = status.st_size, status.st_mtime
            head = file.read(_HEAD_BYTES)
            self._restart_if_replaced(head)
            file.seek(self.offset)
            lines = self._complete_lines(file.read(max_bytes))
        # A resumed run may remove an unfinished last line, so it does not count as read.
        self._head = head[: self.offset]
        return lines

    def _restart_if_replaced(self, head: bytes) -> None:
        if self.size < self.offset or not head.startswith(self._head):
            self.offset = self.num_too_long = 0
            self._inside_too_long = False
            self.generation += 1

    def _complete_lines(self, block: bytes) -> list[bytes]:
        end = block.rfind(b"\n") + 1
        if not end:
            if self._inside_too_long or len(block) > MAX_LINE_BYTES:
                self.num_too_long += not self._inside_too_long
                self._inside_too_long = True
                self.offset += len(block)
            return []
        self.offset += end
        lines = block[: end - 1].split(b"\n")
        if self._inside_too_long:
            self._inside_too_long = False
            del lines[0]
        allowed = [line for line in lines if len(line) <= MAX_LINE_BYTES]
        self.num_too_long += len(lines) - len(allowed)
        return allowed
