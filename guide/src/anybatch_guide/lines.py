"""Lines for the page: an engine's records in the shape of its log, and the kinds that only the page knows."""

import math
import time
from collections.abc import Callable
from typing import Any

from anybatch.core.records import MemoryRecord, PhaseRecord, Record
from anybatch.events.jsonl import line_of
from anybatch.events.schema import SCHEMA_VERSION
from anybatch_guide.experiment import Tell


class RecordLines:
    """An observer that reports each record as a line, at once, so that the receiver may wait, or end the run.

    Phases and the memory of the process are left out: the page shows neither of them.

    Args:
        tell: takes the lines.
        clock: seconds that only go forward.
    """

    def __init__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock = clock
        self._sequence = 0

    def observe(self, record: Record, /) -> None:
        """Report a record of the engine."""
        if not isinstance(record, PhaseRecord | MemoryRecord):
            self._tell(line_of(record, sequence=self._next(), time_seconds=self._clock()))

    def say(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 (whatever JSON has)
        """Report a line of the page's own."""
        head = {"version": SCHEMA_VERSION, "sequence": self._next(), "time_seconds": round(self._clock(), 6)}
        self._tell({**head, "kind": f"guide.{kind}", **fields})

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def finite(value: float) -> float | None:
    """Return a number that JSON can hold; None for those it cannot."""
    return value if math.isfinite(value) else None
