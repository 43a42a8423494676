"""Spans of a rank's work, from the begin and end lines of a log. Times are host times."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from anybatch.events.log_lines import JsonLine

_BEFORE_A_STEP: Final = ("start", "out_of_memory")
_MOST_OPEN: Final = 4096


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a rank: a phase, micro-batch or reduction, in seconds on the clock of the log."""

    kind: str
    name: str
    step: int
    begin_seconds: float
    end_seconds: float
    details: Mapping[str, object]


def spans_of(lines: Iterable[JsonLine]) -> Iterator[Span]:
    """Yield the spans of one rank's lines, each at its end; a begin without an end is dropped.

    Lines with missing or wrong fields are skipped, because a log is untrusted data.
    """
    begun: dict[tuple[str, object, object], float] = {}
    for line in lines:
        kind, now, step = line.get("kind"), line.get("time_seconds"), line.get("step")
        if kind in _BEFORE_A_STEP:
            begun.clear()  # undone by a resume, or of a process with another clock
        named = _named(line)
        if named is None or type(step) is not int or not isinstance(now, int | float):
            continue
        name, key, details = named
        if line.get("event") == "begin" and len(begun) < _MOST_OPEN:
            begun[str(kind), name, key] = float(now)
        elif line.get("event") == "end" and (begin := begun.pop((str(kind), name, key), None)) is not None:
            yield Span(str(kind), name, step, begin, max(begin, float(now)), details)


def clock_shifts(ends: Sequence[Mapping[int, float]]) -> list[float]:
    """Return an offset for the clock of each rank that aligns ranks of several machines.

    Clocks share their zero on one machine only. A step ends at about the same time on all ranks, because they wait for
    each other. A rank whose ends differ by more than a step is shifted by the median difference to the first rank.
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


def _named(line: JsonLine) -> tuple[str, object, dict[str, object]] | None:
    """Return the name of a begin or end line, a key that distinguishes lines of the same name, and its details."""
    kind = line.get("kind")
    keys = {
        "phase": ("name", "position"),
        "micro_batch": ("unit_number", "position"),
        "reduction": ("collective", "bucket"),
    }
    if kind not in keys:
        return None
    name, key = (line.get(field) for field in keys[kind])
    if not isinstance(name, str | int) or not (key is None or isinstance(key, str | int)):
        return None
    details = {
        "phase": ("position",),
        "micro_batch": ("unit_number", "position", "num_samples", "weight"),
        "reduction": ("bucket", "payload", "num_bytes", "dtype"),
    }[kind]
    return (f"unit {name}" if kind == "micro_batch" else str(name)), key, {field: line.get(field) for field in details}
