"""A run's log as a trace for https://ui.perfetto.dev or chrome://tracing, in the Trace Event Format.

Each rank is a process with one track each for phases, micro-batches and reductions. The latter two may overlap, so they
are asynchronous slices. Peak memory, loss and samples are counters; diagnoses and checkpoints are instants.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format, Google).
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from anybatch.errors import UserError
from anybatch.events.log_lines import MOST_LINE_BYTES, JsonLine, LogTail, Span, clock_shifts, decoded_line, spans_of

Event = dict[str, Any]
_PHASES, _MICRO_BATCHES, _REDUCTIONS = 1, 2, 3
_TRACKS: Final = {_PHASES: "phases", _MICRO_BATCHES: "micro-batches", _REDUCTIONS: "reductions"}
_MARKS: Final = ("start", "diagnosis", "evaluate", "checkpoint", "out_of_memory", "end")
_MOST_SECONDS: Final = 1e12
_BLOCK_BYTES: Final = 4 * MOST_LINE_BYTES


@dataclass(frozen=True, slots=True)
class TraceReport:
    """The contents of a trace; `shifted` are ranks whose clock had to be aligned, so their position is approximate."""

    num_ranks: int
    num_steps: int
    num_events: int
    num_skipped: int
    shifted: tuple[int, ...]


def rank_logs(path: str | os.PathLike[str]) -> list[Path]:
    """Return the logs of a run, the lead rank's first."""
    found = Path(path)
    first = found / "events.jsonl" if found.is_dir() else found
    if not first.is_file():
        message = f"there is no log {str(first)!r}. Pass the folder of a run, or its events.jsonl."
        raise UserError(message, code="no_log")
    others = {
        int(number): log
        for log in first.parent.glob(f"{first.stem}-rank-*{first.suffix}")
        if (number := log.stem.rpartition("-")[2]).isdecimal() and log.is_file()
    }
    return [first, *(others[number] for number in sorted(others))]


def write_chrome_trace(
    logs: Iterable[Path], target: Path, *, first_step: int = 0, last_step: int | None = None
) -> TraceReport:
    """Write the trace of a run (logs with the lead rank's first), and return a summary; replaces an existing file."""
    wanted = range(first_step, 2**63 if last_step is None else last_step + 1)
    sources = [_Source(path, rank, wanted) for rank, path in enumerate(logs)]
    ends = [source.step_ends() for source in sources]
    if not ends[0]:
        message = f"{sources[0].path} has no finished step from {first_step} on. Choose other steps, or another run."
        raise UserError(message, code="no_steps")
    shifts = clock_shifts(ends)
    begin = min(source.first_seconds + shift for source, shift in zip(sources, shifts, strict=True))
    num_events = 0
    # Only a regular file is replaced; a device or pipe is written directly.
    replaces = target.is_file() or not target.exists()
    unfinished = target.with_name(f"{target.name}.writing") if replaces else target
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for source, shift in zip(sources, shifts, strict=True):
            num_events += _write_events(file, source.events(shift - begin), is_first=num_events == 0)
        file.write("\n]}\n")
    if replaces:
        unfinished.replace(target)
    return TraceReport(
        num_ranks=len(sources),
        num_steps=len(ends[0]),
        num_events=num_events,
        num_skipped=sum(source.num_skipped for source in sources),
        shifted=tuple(source.rank for source, shift in zip(sources, shifts, strict=True) if shift),
    )


def _write_events(file: TextIO, events: Iterable[Event], *, is_first: bool) -> int:
    number = 0
    for number, event in enumerate(events, start=1):
        separator = "" if is_first and number == 1 else ",\n"
        file.write(separator + _json(event))
    return number


def _json(event: Event) -> str:
    try:
        return json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:  # not one of our logs: numbers that JSON cannot express
        return json.dumps({**event, "args": {"unreadable": repr(event.get("args"))[:200]}}, separators=(",", ":"))


class _Source:
    """The log of a rank, read twice: for the ends of its steps, and for its events."""

    def __init__(self, path: Path, rank: int, wanted: range) -> None:
        self.path = path
        self.rank = rank
        self.num_skipped = 0
        self.first_seconds = math.inf
        self._wanted = wanted

    def lines(self) -> Iterator[JsonLine]:
        """Yield the valid lines; after a restart with an earlier clock, time continues."""
        self.num_skipped = 0
        shift = last = 0.0
        tail = LogTail(self.path)
        texts = tail.read(_BLOCK_BYTES)
        while True:
            before = tail.offset
            for line in map(decoded_line, texts):
                if line is not None and _is_time(line.get("time_seconds")):
                    if line.get("kind") == "start" and line["time_seconds"] + shift < last:
                        shift = last - line["time_seconds"]
                    last = line["time_seconds"] = line["time_seconds"] + shift
                    yield line
                else:
                    self.num_skipped += 1
            texts = tail.read(_BLOCK_BYTES)
            if tail.offset == before:
                self.num_skipped += tail.num_too_long
                return

    def step_ends(self) -> dict[int, float]:
        """Return when the wanted steps ended; for a repeated step, its last end."""
        ends: dict[int, float] = {}
        for line in self.lines():
            step, now = line.get("step"), float(line["time_seconds"])
            if self._wanted.start == 0 or (type(step) is int and step in self._wanted):
                self.first_seconds = min(self.first_seconds, now)
            if line.get("kind") == "step" and type(step) is int and step in self._wanted:
                ends[step] = now
        return ends

    def events(self, shift_seconds: float) -> Iterator[Event]:
        """Yield the events of this rank, starting with the names of its tracks."""
        yield _meta("process_name", self.rank, 0, name=f"rank {self.rank}")
        yield _meta("process_sort_index", self.rank, 0, sort_index=self.rank)
        for track, name in _TRACKS.items():
            yield _meta("thread_name", self.rank, track, name=name)
        last_lines: list[JsonLine] = []
        for line in self.lines():
            if line.get("kind") in ("phase", "micro_batch", "reduction"):
                last_lines.append(line)
                continue
            yield from self._spans(last_lines, shift_seconds)
            last_lines = []
            yield from self._mark(line, _micros(float(line["time_seconds"]) + shift_seconds))
        yield from self._spans(last_lines, shift_seconds)

    def _spans(self, lines: list[JsonLine], shift_seconds: float) -> Iterator[Event]:
        for span in spans_of(lines):
            if span.step in self._wanted:
                yield from self._slice(
                    span, _micros(span.begin_seconds + shift_seconds), _micros(span.end_seconds + shift_seconds)
                )

    def _slice(self, span: Span, begin: float, end: float) -> Iterator[Event]:
        args = {"step": span.step, **{name: value for name, value in span.details.items() if value is not None}}
        place = {"pid": self.rank, "cat": span.kind, "name": span.name, "args": args}
        if span.kind == "reduction":
            key = f"{self.rank}:{span.step}:{span.details['bucket']}:{span.name}"
            yield {**place, "ph": "b", "tid": _REDUCTIONS, "ts": begin, "id": key}
            yield {**place, "ph": "e", "tid": _REDUCTIONS, "ts": end, "id": key}
        else:
            track = _PHASES if span.kind == "phase" else _MICRO_BATCHES
            yield {**place, "ph": "X", "tid": track, "ts": begin, "dur": round(end - begin, 3)}

    def _mark(self, line: JsonLine, now: float) -> Iterator[Event]:
        kind, step = line.get("kind"), line.get("step")
        if now < 0 or (type(step) is int and step not in self._wanted):
            return
        place = {"pid": self.rank, "tid": _PHASES, "ts": now}
        if kind == "step":
            for name in ("loss", "gradient_norm", "num_samples"):
                value = line.get(name)
                if isinstance(value, int | float) and abs(value) < math.inf:
                    yield {**place, "ph": "C", "name": name, "args": {name: value}}
        elif kind == "memory" and type(line.get("peak_bytes")) is int:
            yield {**place, "ph": "C", "name": "peak memory", "args": {"bytes": line["peak_bytes"]}}
        elif kind in _MARKS:
            args = {name: value for name, value in line.items() if name not in ("version", "kind", "time_seconds")}
            yield {**place, "ph": "i", "s": "p", "name": str(kind), "args": args}


def _meta(kind: str, rank: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST_SECONDS


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
