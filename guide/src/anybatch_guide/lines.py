"""Events for the page as JSON objects: the engine's records in the format of its log, and events of the guide."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from anybatch.core.records import MemoryRecord, PhaseRecord, Record
from anybatch.events.jsonl import line_of
from anybatch.events.log_lines import SCHEMA_VERSION
from anybatch_guide.experiment import Emit

NOT_SHOWN = (PhaseRecord, MemoryRecord)
"""Records that the page does not show."""


class RecordLines:
    """An observer that emits each record immediately as one event, so that the receiver can pause or cancel the run.

    Phases and process memory are skipped, because the page does not show them.
    """

    def __init__(self, emit: Emit, clock: Callable[[], float] = time.monotonic) -> None:
        self._emit = emit
        self._clock = clock
        self._sequence = 0

    def observe(self, record: Record, /) -> None:
        """Emit a record of the engine."""
        if not isinstance(record, NOT_SHOWN):
            self._emit(line_of(record, sequence=self._next(), time_seconds=self._clock()))

    def emit(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 (any JSON value)
        """Emit an event of the guide, of kind `guide.<kind>`."""
        head = {"version": SCHEMA_VERSION, "sequence": self._next(), "time_seconds": round(self._clock(), 6)}
        self._emit({**head, "kind": f"guide.{kind}", **fields})

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1


def significant(value: float, digits: int) -> float:
    """Return a number rounded to the given number of significant digits."""
    return float(f"{value:.{digits}g}")


def rounded(values: Iterable[float], digits: int) -> list[float]:
    """Return numbers rounded to the given number of significant digits."""
    return [significant(value, digits) for value in values]


def finite(value: float) -> float | None:
    """Return a number, or None for NaN and infinities, which JSON cannot represent."""
    return value if math.isfinite(value) else None
