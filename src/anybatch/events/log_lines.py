"""The lines of a log as bytes, also while a run writes them. Does not import torch, which takes seconds.

The writer may have been killed, may still be writing, or may be malicious: every line is validated, and an unfinished
one waits.
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
