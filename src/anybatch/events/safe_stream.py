"""A stream that never raises: unwritable text is dropped."""

import io
from typing import TextIO


class SafeStream(io.TextIOBase):
    """Wraps a text stream for output that no result depends on.

    Output to a closed terminal, a broken pipe or a full disk is dropped. Characters outside the encoding are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]  # (a plain attribute there, never set)
        """Name of the encoding in which characters are written."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str, /) -> int:
        """Write a text, or drop it."""
        if not self._is_lost:
            # A name with a character outside the encoding is escaped instead of ending the run.
            writable = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
            try:
                self._stream.write(writable)
            except (OSError, ValueError):  # a closed file raises ValueError
                self._is_lost = True
        # The caller must not notice dropped text.
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
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
