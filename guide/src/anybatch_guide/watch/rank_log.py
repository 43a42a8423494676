"""The log of one rank, read incrementally, in bounded memory."""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from anybatch.events.log_lines import decoded_line
from anybatch_guide.watch.curve import CLIPPED, SKIPPED, UNREAD, Curve, Step
from anybatch_guide.watch.fields import Line, first_number, integer, integers, number, numbers, text, texts, time_of
from anybatch_guide.watch.log_tail import LogTail

NOT_RECORDED: Final = "not recorded"  # written by `ab.record`
MAX_SPAN_LINES: Final = 4000
NUM_STEPS_OF_SPANS: Final = 8
MAX_ENTRIES: Final = 200
_MAX_SECONDS: Final = 1e9
_NAN: Final = float("nan")
# Most lines are spans, and only the spans of the latest steps are needed.
_SPAN: Final = re.compile(
    rb'\{"version":1,"sequence":\d{1,16},"time_seconds":-?[\d.]{1,24},"kind":"(?:phase|micro_batch|reduction)",'
)
_PEAK: Final = re.compile(rb'"peak_bytes":(\d{1,16})\b')
_MEMORY: Final = re.compile(rb'\{"version":1,"sequence":\d{1,16},"time_seconds":-?[\d.]{1,24},"kind":"memory",')
_TIMED_KINDS: Final = ("start", "step")
_FACTS: Final = ("geometry", "strategy", "precision", "device", "dtype")
_SIZES: Final = (
    "rank",
    "world_size",
    "effective_batch_size",
    "micro_batch_size",
    "seed",
    "num_parameters",
    "gradient_bytes",
)

Entry = dict[str, Any]


def _entries() -> deque[Entry]:
    return deque(maxlen=MAX_ENTRIES)


@dataclass(slots=True)
class SpanLines:
    """The log lines of one step of a rank, decoded on demand."""

    step: int  # number of the step
    seconds: float  # end of the step, on the clock of the log
    lines: list[bytes]  # lines of the step's spans


@dataclass(slots=True)
class LogContent:
    """The decoded content of a log so far."""

    facts: Entry = field(default_factory=dict)  # settings in the latest "start" line
    curve: Curve = field(default_factory=Curve)  # curve of the steps
    geometry: deque[Entry] = field(default_factory=_entries)  # splits of the batch, with their first step
    diagnoses: deque[Entry] = field(default_factory=_entries)  # the latest diagnoses
    # Evaluations from the whole run; of earlier evaluations only every second, fourth, and so on.
    evaluations: deque[Entry] = field(default_factory=_entries)
    checkpoints: deque[Entry] = field(default_factory=_entries)  # written and read checkpoints
    end: Entry | None = None  # the last record of a finished run
    memory: bytes = b""  # the latest line about memory
    largest_peak: int = 0  # the largest peak of all lines about memory
    num_starts: int = 0  # number of processes that wrote the log
    num_diagnoses: int = 0  # number of all diagnoses, including dropped ones
    # the latest steps, with spans
    latest: deque[SpanLines] = field(default_factory=lambda: deque(maxlen=NUM_STEPS_OF_SPANS))
    num_skipped: int = 0  # number of invalid lines


class RankLog:
    """Reads the log of one rank as it grows."""

    def __init__(self, path: Path) -> None:
        """Store the path without opening the file."""
        self.tail = LogTail(path)
        self.read_error: str | None = None
        self._begin()

    def read(self, max_bytes: int) -> bool:
        """Read new content, at most the given number of bytes, and return whether anything changed."""
        tail, read_error = self.tail, self.read_error
        generation, before = tail.generation, (tail.generation, tail.offset, tail.num_too_long)
        try:
            lines = tail.read(max_bytes)
        except OSError as error:
            self.read_error = error.strerror or "cannot be read"
            return self.read_error != read_error
        self.read_error = None
        if tail.generation != generation:
            self._begin()
        is_span = _SPAN.match
        for line in lines:
            # Inlined for speed, because this handles most lines.
            if not is_span(line):
                self._process(line)
            elif len(self._spans) < MAX_SPAN_LINES:
                self._spans.append(line)
        return read_error is not None or (tail.generation, tail.offset, tail.num_too_long) != before

    def _begin(self) -> None:
        self.content = LogContent()
        self._spans: list[bytes] = []
        self._clock_begin: float | None = None
        self._earlier_seconds = self._seconds = 0.0

    def _process(self, raw_line: bytes) -> None:
        if _MEMORY.match(raw_line) and (peak := _PEAK.search(raw_line)):
            self.content.memory = raw_line
            self.content.largest_peak = max(self.content.largest_peak, int(peak.group(1)))
            return
        line = decoded_line(raw_line)
        now = None if line is None else time_of(line)
        if line is None or now is None:
            self.content.num_skipped += 1
            return
        handle = self._HANDLERS.get(str(line.get("kind")))
        if handle is not None:
            if self._clock_begin is None or line["kind"] == "start":
                # A new process: the pause before it does not count, and its clock may have another zero.
                self._earlier_seconds, self._clock_begin = min(self._seconds, _MAX_SECONDS), now
            elapsed = min(max(0.0, now - self._clock_begin), _MAX_SECONDS)
            # A resumed process logs its checkpoint and diagnoses before its start.
            if line["kind"] in _TIMED_KINDS:
                self._seconds = max(self._seconds, self._earlier_seconds + elapsed)
            handle(self, line, now)

    def _start(self, line: Line, _now: float) -> None:
        first = integer(line, "first_step") or 0
        content = self.content
        content.curve.drop_from(first)
        content.num_starts += 1
        content.end = None
        content.facts = {
            **{name: None if line.get(name) == NOT_RECORDED else text(line, name, 200) for name in _FACTS},
            **{name: integer(line, name) for name in _SIZES},
            "num_parameters": integer(line, "num_parameters") or None,  # `ab.record` does not know the number
            "versions": texts(line, "versions"),
            "decisions": texts(line, "decisions"),
        }
        content.evaluations = deque(
            (evaluation for evaluation in content.evaluations if evaluation["step"] <= first), maxlen=MAX_ENTRIES
        )
        if line.get("geometry") != NOT_RECORDED:
            why = "start of the run" if first == 0 else "resumed from a checkpoint"
            content.geometry.append({"step": first, "text": content.facts["geometry"] or "unknown", "why": why})
        self._spans = []

    def _step(self, line: Line, now: float) -> None:
        step, samples = integer(line, "step"), integer(line, "num_samples")
        if step is None:
            self.content.num_skipped += 1
            return
        losses = [_NAN if value is None else value for value in (number(line, "loss"), number(line, "gradient_norm"))]
        rate = first_number(line, "learning_rates")
        self.content.curve.add(
            Step(
                step=step,
                samples=min(samples or 0, 2**40),
                seconds=self._seconds,
                loss=losses[0],
                norm=losses[1],
                rate=_NAN if rate is None else rate,
                flags=CLIPPED * (line.get("clipped") is True)
                + SKIPPED * (line.get("skipped") is True)
                + UNREAD * (line.get("loss") is None),
            )
        )
        self.content.latest.append(SpanLines(step, now, self._spans))
        self._spans = []

    def _evaluate(self, line: Line, _now: float) -> None:
        if len(self.content.evaluations) == MAX_ENTRIES:  # keep entries from the whole run
            self.content.evaluations = deque(list(self.content.evaluations)[::2], maxlen=MAX_ENTRIES)
        self.content.evaluations.append(
            {
                "step": integer(line, "step") or 0,
                "samples": integer(line, "num_samples"),
                "metrics": numbers(line, "metrics"),
            }
        )

    def _checkpoint(self, line: Line, _now: float) -> None:
        names = {"event": text(line, "event", 20), "path": text(line, "path", 400), "message": text(line, "message")}
        self.content.checkpoints.append({"step": integer(line, "step"), "bytes": integer(line, "num_bytes"), **names})

    def _diagnosis(self, line: Line, _now: float) -> None:
        level = line.get("level") if line.get("level") in ("info", "warning", "error") else "info"
        self.content.num_diagnoses += 1
        fields = {name: text(line, name) for name in ("code", "message", "remedy")}
        self.content.diagnoses.append(
            {"rank": integer(line, "rank"), "step": integer(line, "step"), "level": level, **fields}
        )

    def _out_of_memory(self, line: Line, _now: float) -> None:
        step, after = integer(line, "step") or 0, integer(line, "micro_batch_size_after")
        before = integer(line, "micro_batch_size_before")
        size = f"micro-batches of at most {after} instead of {before}" if after else f"micro-batches of {before}"
        self.content.geometry.append({"step": step, "text": size, "why": "out of memory; the step was repeated"})
        self._spans = []

    def _memory(self, line: Line, _now: float) -> None:
        """Handle a memory line that `_MEMORY` does not match."""
        self.content.largest_peak = max(self.content.largest_peak, integer(line, "peak_bytes") or 0)

    def _end(self, line: Line, _now: float) -> None:
        status = line.get("status") if line.get("status") in ("completed", "stopped", "failed") else "stopped"
        self.content.end = {"status": status, "message": text(line, "message"), "steps": integer(line, "num_steps")}

    _HANDLERS: Final[Mapping[str, Callable[["RankLog", Line, float], None]]] = {
        "start": _start,
        "step": _step,
        "evaluate": _evaluate,
        "checkpoint": _checkpoint,
        "diagnosis": _diagnosis,
        "out_of_memory": _out_of_memory,
        "memory": _memory,
        "end": _end,
    }


def memory_of(log: RankLog) -> Entry | None:
    """Return the memory of a rank's device after its latest step; None if the log has no such line."""
    line = decoded_line(log.content.memory) if log.content.memory else None
    if line is None:
        return None
    sizes = {
        name: integer(line, name) for name in ("step", "allocated_bytes", "reserved_bytes", "peak_bytes", "limit_bytes")
    }
    return {**sizes, "categories": integers(line, "category_bytes"), "largest_peak_bytes": log.content.largest_peak}
