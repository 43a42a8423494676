"""A stream that a run survives: what cannot be written is lost, and nothing is raised."""

import io
from typing import TextIO


class SafeStream(io.TextIOBase):
    """A text stream in front of another one, for text that no result depends on.

    A terminal that was closed, a pipe that is no longer read and a full disk make it fall silent. Characters that
    the encoding lacks are written as their codes.

    Args:
        stream: where to write.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # (a plain attribute there, never set)
        """Name of the encoding in which characters are written."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write a text, or lose it."""
        if not self._is_lost:
            # A name with a character that the terminal lacks must not end a run, and is readable as an escape.
            writable = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(writable)
            except (OSError, ValueError):  # ValueError is what a closed file raises
                self._is_lost = True
        # Also where the text is lost, which the caller must not notice.
        return len(text)

    def flush(self) -> None:
        """Bring everything to its reader."""
        if not self._is_lost:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._is_lost = True

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        """Return the number of the file."""
        return self._stream.fileno()
