"""Reads the lines of a log, without importing torch, which takes seconds.

Every line is validated, because the writer may have been killed, may still be writing, or may be malicious.
"""

import itertools
import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION = 1

JsonLine = dict[str, Any]


_DECODER: Final = json.JSONDecoder(parse_constant=lambda _: None)
"""Reads the literals NaN and Infinity as null; they are not valid JSON, and `JsonlLog` writes strings instead."""


def decoded_line(text: bytes) -> JsonLine | None:
    """Return a line as a dict; None if it is not JSON or has another schema version."""
    line = decoded_object(text)
    return line if line is not None and line.get("version") == SCHEMA_VERSION else None


def decoded_object(text: bytes) -> JsonLine | None:
    """Return the JSON object in a text; None if the text has no valid object."""
    try:
        value = _DECODER.decode(text.decode())
    except (ValueError, RecursionError):  # not JSON, not text, or malicious
        return None
    return value if isinstance(value, dict) else None


class JsonlLines:
    """The lines of a log as dicts, read from the file in each iteration; see `read_jsonl`.

    `num_skipped` is the number of unreadable lines in the last iteration.
    """

    def __init__(self, path: Path) -> None:
        """Store the path; each iteration opens the file."""
        self._path = path
        self.num_skipped = 0

    def __iter__(self) -> Iterator[JsonLine]:
        """Yield the lines, except an unfinished last line."""
        self.num_skipped = 0
        with self._path.open("rb") as file:
            for text in file:
                # A run may be writing this line; the next iteration reads it if it is complete.
                if not text.endswith(b"\n"):
                    return
                line = decoded_line(text)
                if line is None:
                    self.num_skipped += 1
                else:
                    yield line


def read_jsonl(path: str | os.PathLike[str]) -> JsonlLines:
    """Return an iterable over the lines of a log; its `num_skipped` is the number of unreadable lines.

    NaN and infinite numbers are strings; convert them with `float`. Ignore kinds and fields that you do not know.

    Args:
        path: the file of a `JsonlLog`, finished or still being written.

    Raises:
        OSError: the file cannot be opened; raised by the iteration.
    """
    return JsonlLines(Path(path))


_RESETTING_KINDS: Final = ("start", "out_of_memory")
_MAX_OPEN_SPANS: Final = 4096


@dataclass(frozen=True, slots=True)
class Span:
    """The interval of a phase, micro-batch or reduction on a rank, in seconds of the log's clock."""

    kind: str
    name: str
    step: int
    begin_seconds: float
    end_seconds: float
    details: Mapping[str, object]


def spans_of(lines: Iterable[JsonLine]) -> Iterator[Span]:
    """Yield the spans in the lines of a rank, in the order of their ends; a begin without an end is dropped.

    Lines with missing or wrong fields are skipped, because a log is untrusted data.
    """
    begun: dict[tuple[str, object, object], float] = {}
    for line in lines:
        kind, now, step = line.get("kind"), line.get("time_seconds"), line.get("step")
        if kind in _RESETTING_KINDS:
            begun.clear()  # the step of these spans was undone, or their process had another clock
        named = _named(line)
        if named is None or type(step) is not int or not isinstance(now, int | float):
            continue
        name, key, details = named
        if line.get("event") == "begin" and len(begun) < _MAX_OPEN_SPANS:
            begun[str(kind), name, key] = float(now)
        elif line.get("event") == "end" and (begin := begun.pop((str(kind), name, key), None)) is not None:
            yield Span(str(kind), name, step, begin, max(begin, float(now)), details)


def clock_shifts(ends: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the seconds to add to the clock of each rank, to align ranks of several machines.

    Only clocks of one machine share a zero, but a step ends at about the same time on all ranks. So the shift is the
    median time between the ends of a step on a rank and on the first rank; 0 if this is at most the longest step.
    """
    shifts = [0.0]
    for other in ends[1:]:
        common = sorted(ends[0].keys() & other.keys())
        differences = [ends[0][step] - other[step] for step in common]
        shift = statistics.median(differences) if differences else 0.0
        times = [ends[0][step] for step in common]
        longest = max((later - earlier for earlier, later in itertools.pairwise(times)), default=1.0)
        shifts.append(shift if abs(shift) > longest else 0.0)
    return shifts[: len(ends)]


_SPAN_FIELDS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "phase": ("name", "position", ("position",)),
    "micro_batch": ("unit_number", "position", ("unit_number", "position", "num_samples", "weight")),
    "reduction": ("collective", "bucket", ("bucket", "payload", "num_bytes", "dtype")),
}
"""Kind of line -> the field with the span's name, the field that distinguishes equal names, and the detail fields."""


def _named(line: JsonLine) -> tuple[str, object, dict[str, object]] | None:
    """Return the name, key and details of a begin or end line."""
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in _SPAN_FIELDS:
        return None
    name_field, key_field, details = _SPAN_FIELDS[kind]
    name, key = line.get(name_field), line.get(key_field)
    if not isinstance(name, str | int) or not (key is None or isinstance(key, str | int)):
        return None
    return (f"unit {name}" if kind == "micro_batch" else str(name)), key, {field: line.get(field) for field in details}
