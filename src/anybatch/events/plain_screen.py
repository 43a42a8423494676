"""A run in plain lines, for pipes, files and CI."""

from collections.abc import Iterable

from anybatch.events.safe_stream import SafeStream
from anybatch.events.screen import Level, ScreenCell, ScreenContents


class PlainScreen:
    """Prints lines, for progress (with a minimum interval in seconds) and for events."""

    shows_beginning = False

    def __init__(
        self, stream: SafeStream, *, seconds_per_step: float = 5.0, seconds_per_micro_batch: float = 30.0
    ) -> None:
        self.seconds_per_step = seconds_per_step
        self.seconds_per_micro_batch = seconds_per_micro_batch
        self._stream = stream

    def say(self, line: str, level: Level, /) -> None:  # noqa: ARG002 (the line itself says "warning" or "error")
        """Print a line."""
        self._stream.write(f"{line}\n")
        # Flushed per line, so that a reader of the file or pipe sees it immediately.
        self._stream.flush()

    def show(self, moment: ScreenContents, /) -> None:
        """Print the progress of the run, in columns."""
        left = [] if moment.time_left is None else [ScreenCell("left", moment.time_left, 11)]
        if moment.is_within_step and moment.underway is not None:
            cells = [moment.underway, *left]
        else:
            cells = [*moment.cells, *left]
        self.say("   ".join([moment.heading, *_columns(cells)]).rstrip(), "plain")

    def close(self) -> None:
        """Do nothing, because every line is written."""


def _columns(cells: Iterable[ScreenCell]) -> Iterable[str]:
    return (f"{cell.label} {cell.value:>{cell.value_width}}" for cell in cells)
