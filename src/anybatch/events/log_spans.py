"""What a rank did when, as spans: the begins and ends of a log put together. Times are of the host, from the log."""

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
    """Something that took time on a rank.

    Attributes:
        kind: phase, micro_batch or reduction.
        name: of the phase, the micro-batch or the collective.
        step: that it belongs to.
        begin_seconds: on the clock of the log.
        end_seconds: on the same clock.
        details: what else the log says of it, as it stands there.
    """

    kind: str
    name: str
    step: int
    begin_seconds: float
    end_seconds: float
    details: Mapping[str, object]


def spans_of(lines: Iterable[JsonLine]) -> Iterator[Span]:
    """Yield the spans of the lines of one rank, each at its end; a begin without an end has none.

    What a line lacks or has of another type leaves it out: a log is data that anybody may have written.
    """
    begun: dict[tuple[str, object, object], float] = {}
    for line in lines:
        kind, now, step = line.get("kind"), line.get("time_seconds"), line.get("step")
        if kind in _BEFORE_A_STEP:
            begun.clear()  # what had begun was undone, or is of a process whose clock has gone
        named = _named(line)
        if named is None or type(step) is not int or not isinstance(now, int | float):
            continue
        name, key, details = named
        if line.get("event") == "begin" and len(begun) < _MOST_OPEN:
            begun[str(kind), name, key] = float(now)
        elif line.get("event") == "end" and (begin := begun.pop((str(kind), name, key), None)) is not None:
            yield Span(str(kind), name, step, begin, max(begin, float(now)), details)


def clock_shifts(ends: Sequence[Mapping[int, float]]) -> list[float]:
    """Return what to add to the clock of each rank, so that the ranks of several machines stand side by side.

    A clock's zero means nothing, and is the same on one machine only. A step ends on all ranks at about the same time,
    since they wait for one another: ranks whose ends differ by more than the steps take have other clocks, and are
    shifted by the median difference to the first rank.

    Args:
        ends: of each rank, step to the time at which it was over.
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
    """Return the name of what a line begins or ends, what tells it from others of that name, and its details."""
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
