"""A run's log as a trace for https://ui.perfetto.dev or chrome://tracing, in the Trace Event Format.

Each rank is a process with three tracks: phases, micro-batches and reductions. Reductions may overlap, so they are
asynchronous slices. Peak memory, loss and samples are counters; diagnoses and checkpoints are instants.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format, Google).
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from anybatch.errors import UserError
from anybatch.events.log_lines import JsonLine, Span, clock_shifts, read_jsonl, spans_of

Event = dict[str, Any]
_PHASES, _MICRO_BATCHES, _REDUCTIONS = 1, 2, 3
_TRACKS: Final = {_PHASES: "phases", _MICRO_BATCHES: "micro-batches", _REDUCTIONS: "reductions"}
_MARKS: Final = ("start", "diagnosis", "evaluate", "checkpoint", "out_of_memory", "end")
_MAX_SECONDS: Final = 1e12


@dataclass(frozen=True, slots=True)
class TraceReport:
    """A summary of a trace."""

    file: Path
    num_ranks: int
    num_steps: int
    num_events: int
    num_skipped: int  # unreadable lines of the logs
    shifted: tuple[int, ...]  # ranks whose clocks were shifted, so their times are approximate

    def __str__(self) -> str:
        """Return the summary as text."""
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks != 1)}"
        lines = [f"wrote {self.file}: {self.num_steps} steps, {ranks}, {self.num_events} events"]
        if self.num_skipped:
            lines.append(f"skipped {self.num_skipped} unreadable lines")
        if self.shifted:
            names = ", ".join(map(str, self.shifted))
            lines.append(f"clocks of ranks {names} differ from rank 0's: their events are shifted to align steps")
        return "\n".join(lines)


def rank_logs(path: str | os.PathLike[str]) -> list[Path]:
    """Return the logs of a run's ranks, in the order of ranks; `path` is the run's folder or the log of rank 0."""
    path = Path(path)
    first = path / "events.jsonl" if path.is_dir() else path
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
    """Write the trace of a run to `target`, replacing it, and return a summary; `logs` are in the order of ranks."""
    steps = range(first_step, 2**63 if last_step is None else last_step + 1)
    sources = [_Source(path, rank, steps) for rank, path in enumerate(logs)]
    ends = [source.step_ends() for source in sources]
    if not ends[0]:
        message = f"{sources[0].path} has no finished step from {first_step} on. Choose other steps, or another run."
        raise UserError(message, code="no_steps")
    shifts = clock_shifts(ends)
    begin = min(source.first_seconds + shift for source, shift in zip(sources, shifts, strict=True))
    num_events = 0
    with target.open("w", encoding="utf-8", newline="\n") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for source, shift in zip(sources, shifts, strict=True):
            for event in source.events(shift - begin):
                separator = ",\n" if num_events else ""
                file.write(separator + json.dumps(event, separators=(",", ":")))
                num_events += 1
        file.write("\n]}\n")
    return TraceReport(
        file=target,
        num_ranks=len(sources),
        num_steps=len(ends[0]),
        num_events=num_events,
        num_skipped=sum(source.num_skipped for source in sources),
        shifted=tuple(source.rank for source, shift in zip(sources, shifts, strict=True) if shift),
    )


class _Source:
    """The log of a rank, read three times: for the ends of steps, for spans, and for other events."""

    def __init__(self, path: Path, rank: int, steps: range) -> None:
        self.path = path
        self.rank = rank
        self.num_skipped = 0
        self.first_seconds = math.inf
        self._steps = steps

    def lines(self) -> Iterator[JsonLine]:
        """Yield the lines that have a time. If the clock starts again after a restart, later times are shifted."""
        num_untimed, shift, last = 0, 0.0, 0.0
        lines = read_jsonl(self.path)
        for line in lines:
            now = line.get("time_seconds")
            if not isinstance(now, int | float) or abs(now) >= _MAX_SECONDS:
                num_untimed += 1
                continue
            if line.get("kind") == "start" and now + shift < last:
                shift = last - now
            last = line["time_seconds"] = now + shift
            yield line
        self.num_skipped = lines.num_skipped + num_untimed

    def step_ends(self) -> dict[int, float]:
        """Return the time at which each selected step ended; of a repeated step, the time of its last run."""
        ends: dict[int, float] = {}
        for line in self.lines():
            step, now = line.get("step"), float(line["time_seconds"])
            if self._steps.start == 0 or (type(step) is int and step in self._steps):
                self.first_seconds = min(self.first_seconds, now)
            if line.get("kind") == "step" and type(step) is int and step in self._steps:
                ends[step] = now
        return ends

    def events(self, shift_seconds: float) -> Iterator[Event]:
        """Yield the trace events of this rank, starting with the names of its tracks."""
        yield _meta("process_name", self.rank, 0, name=f"rank {self.rank}")
        yield _meta("process_sort_index", self.rank, 0, sort_index=self.rank)
        for track, name in _TRACKS.items():
            yield _meta("thread_name", self.rank, track, name=name)
        for span in spans_of(self.lines()):
            if span.step in self._steps:
                yield from self._slice(span, shift_seconds)
        for line in self.lines():
            yield from self._mark(line, _micros(float(line["time_seconds"]) + shift_seconds))

    def _slice(self, span: Span, shift_seconds: float) -> Iterator[Event]:
        begin, end = _micros(span.begin_seconds + shift_seconds), _micros(span.end_seconds + shift_seconds)
        args = {"step": span.step, **{name: value for name, value in span.details.items() if value is not None}}
        slice_ = {"pid": self.rank, "cat": span.kind, "name": span.name, "args": args}
        if span.kind == "reduction":
            key = f"{self.rank}:{span.step}:{span.details['bucket']}:{span.name}"
            yield {**slice_, "ph": "b", "tid": _REDUCTIONS, "ts": begin, "id": key}
            yield {**slice_, "ph": "e", "tid": _REDUCTIONS, "ts": end, "id": key}
        else:
            track = _PHASES if span.kind == "phase" else _MICRO_BATCHES
            yield {**slice_, "ph": "X", "tid": track, "ts": begin, "dur": round(end - begin, 3)}

    def _mark(self, line: JsonLine, now: float) -> Iterator[Event]:
        kind, step = line.get("kind"), line.get("step")
        if now < 0 or (type(step) is int and step not in self._steps):
            return
        event = {"pid": self.rank, "tid": _PHASES, "ts": now}
        if kind == "step":
            for name in ("loss", "gradient_norm", "num_samples"):
                value = line.get(name)
                if isinstance(value, int | float) and abs(value) < math.inf:
                    yield {**event, "ph": "C", "name": name, "args": {name: value}}
        elif kind == "memory" and type(line.get("peak_bytes")) is int:
            yield {**event, "ph": "C", "name": "peak memory", "args": {"bytes": line["peak_bytes"]}}
        elif kind in _MARKS:
            args = {name: value for name, value in line.items() if name not in ("version", "kind", "time_seconds")}
            yield {**event, "ph": "i", "s": "p", "name": str(kind), "args": args}


def _meta(kind: str, rank: int, track: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
