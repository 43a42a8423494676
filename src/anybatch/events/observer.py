"""Shared by observers: a `with`, numbers read from their device, records as sentences, and the speed of a run."""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

import torch

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    Flag,
    OutOfMemoryRecord,
    Record,
    Scalar,
    StartRecord,
)
from anybatch.core.units import duration, in_bytes, three_digits


class ClosingObserver(ABC):
    """An observer that is closed at the end of a `with`, also after an error."""

    @abstractmethod
    def observe(self, record: Record, /) -> None:
        """Process a record."""

    @abstractmethod
    def close(self) -> None:
        """Write the rest, and release what is held. Closing twice is allowed."""

    def __enter__(self) -> Self:
        """Return the observer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def read_number(value: Scalar | Flag) -> float | None:
    """Return a number, waiting for its device; None if the device failed (the error is reported elsewhere)."""
    with contextlib.suppress(RuntimeError):
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    return None


Level = Literal["plain", "result", "warning", "error"]
Sentence = tuple[str, Level]
_DIAGNOSES: Mapping[str, tuple[str, Level]] = MappingProxyType(
    {"info": ("note", "plain"), "warning": ("warning", "warning"), "error": ("error", "error")}
)
_NUM_NAMED_STEPS = 5


def step_of(num_steps: int, total_steps: int | None) -> str:
    """Return `step 1,234 of 5,000`, or `step 1,234` without a total, with a constant width."""
    if total_steps is None:
        return f"step {num_steps:>7,}"
    total = f"{total_steps:,}"
    return f"step {f'{num_steps:,}':>{len(total)}} of {total}"


def lines_of_start(record: StartRecord) -> Iterator[str]:
    """Yield the facts and the decisions of a run, line by line."""
    yield record.geometry
    software = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    yield (
        f"{record.device}, precision {record.precision}, {record.num_parameters:,} parameters of {record.dtype}, "
        f"gradients of {in_bytes(record.gradient_bytes)}, strategy {record.strategy}"
    )
    if software:
        yield software
    for name, decision in record.decisions.items():
        yield f"{name.replace('_', ' ')}: {_in_one_line(decision)}"
    if record.first_step:
        yield f"resuming after step {record.first_step:,}"


def message_of(record: Record, total_steps: int | None, *, seconds: float | None = None) -> Sentence:
    """Return a record as a sentence with its level; `seconds` is the duration of the session, for its end."""
    match record:
        case EvaluateRecord():
            samples = f"{record.num_samples:,} sample{'s' * (record.num_samples != 1)}"
            values = (
                ", ".join(f"{name} {three_digits(read_number(value))}" for name, value in record.metrics.items())
                or "no metrics"
            )
            return f"{step_of(record.step, total_steps)}   evaluation of {samples}: {values}", "result"
        case CheckpointRecord():
            return _about_checkpoint(record, total_steps)
        case DiagnosisRecord():
            return _about_diagnosis(record, total_steps)
        case OutOfMemoryRecord():
            return _about_out_of_memory(record, total_steps)
        case EndRecord():
            return _about_end(record, seconds)
        case _:
            message = f"no sentence for a record of kind {record.kind}"
            raise AssertionError(message)


def skipped_line(numbers: Sequence[int], total_steps: int | None) -> str:
    """Return the sentence about steps with a skipped update."""
    start = f"{step_of(numbers[-1], total_steps)}   warning: update skipped, because the gradient was not finite"
    if len(numbers) == 1:
        return start
    named = ", ".join(f"{number:,}" for number in numbers[:_NUM_NAMED_STEPS])
    more = f" and {len(numbers) - _NUM_NAMED_STEPS:,} more" * (len(numbers) > _NUM_NAMED_STEPS)
    return f"{start}, in {len(numbers):,} steps: {named}{more}"


def _about_checkpoint(record: CheckpointRecord, total_steps: int | None) -> Sentence:
    where = step_of(record.step, total_steps)
    if record.event == "fell_back":
        reason = "it cannot be read" if record.message is None else _in_one_line(record.message)
        return f"{where}   warning: skipped checkpoint {record.path}: {reason}", "warning"
    size = "" if record.num_bytes is None else f" ({in_bytes(record.num_bytes)})"
    return f"{where}   checkpoint {record.event}: {record.path}{size}", "plain"


def _about_diagnosis(record: DiagnosisRecord, total_steps: int | None) -> Sentence:
    word, level = _DIAGNOSES[record.level]
    # Records number steps from 0, sentences from 1.
    where = "" if record.step is None else f"{step_of(record.step + 1, total_steps)}   "
    message, remedy = _in_one_line(record.message), _in_one_line(record.remedy or "")
    if remedy:
        message = f"{message}{'' if message.endswith(('.', '!', '?', ':')) else '.'} {remedy}"
    return f"{where}{word}: {message}", level


def _about_out_of_memory(record: OutOfMemoryRecord, total_steps: int | None) -> Sentence:
    where = step_of(record.step + 1, total_steps)
    before, after = record.micro_batch_size_before, record.micro_batch_size_after
    phase = "on another rank" if record.phase is None else f"in {record.phase.replace('_', ' and ')}"
    if after is None:
        text = f"error: out of memory {phase} at {before:,} samples per micro-batch, and no smaller size can help"
        return f"{where}   {text}", "error"
    text = f"warning: out of memory {phase}: micro-batch {before:,} -> {after:,} samples, repeating the step"
    return f"{where}   {text}", "warning"


def _about_end(record: EndRecord, seconds: float | None) -> Sentence:
    steps = f"{record.num_steps:,} step{'s' * (record.num_steps != 1)}"
    took = "" if seconds is None else f" after {duration(seconds)}"
    # Only the first line, because this is one sentence.
    reason = "" if record.message is None else f": {record.message.strip().partition(chr(10))[0]}"
    level: Level = "error" if record.status == "failed" else "result"
    return f"{record.status}{took}, {steps} made{reason}", level


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _StepEnd:
    """The end of a step on two clocks, with the progress so far."""

    seconds: float
    stepping_seconds: float
    num_steps: int
    num_samples: int


class Throughput:
    """The speed of a session, from the ends of its steps.

    Samples per second are over the last seconds, or the last step if it took longer, without evaluations and
    checkpoints. The remaining time includes them, by the mean of the session. The first step is ignored once there is a
    second, because it allocates and compiles.
    """

    def __init__(self, *, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._aside_seconds = 0.0
        self._begun: _StepEnd | None = None
        self._first: _StepEnd | None = None
        self._last: _StepEnd | None = None
        self._moved_seconds: float | None = None
        self._recent: deque[_StepEnd] = deque()

    def begin(self, seconds: float) -> None:
        """Set the time at which the first step begins."""
        self._moved_seconds = seconds
        self._begun = self._first = self._last = self._end_at(seconds, 0, 0)
        self._recent.append(self._last)

    def step(self, seconds: float, num_samples: int) -> None:
        """Add the end of a step, and its samples over all ranks."""
        if self._last is None:
            self.begin(seconds)
        assert self._last is not None
        before, self._moved_seconds = self._last, seconds
        self._last = self._end_at(seconds, before.num_steps + 1, before.num_samples + num_samples)
        self._recent.append(self._last)
        # The first step compiles, allocates optimizer state and warms caches, so it is not typical.
        if self._last.num_steps == 2:  # noqa: PLR2004 (the second step: from now on there is a pace without the first)
            self._first = before
            self._recent.popleft()
        # One step older than the window is kept, so that the span covers the window.
        oldest_wanted = self._last.stepping_seconds - self._window_seconds
        while len(self._recent) > 2 and self._recent[1].stepping_seconds <= oldest_wanted:  # noqa: PLR2004 (one step)
            self._recent.popleft()

    def aside(self, seconds: float) -> None:
        """Add the end of an evaluation or checkpoint."""
        if self._moved_seconds is not None:
            self._aside_seconds += seconds - self._moved_seconds
            self._moved_seconds = seconds

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second during steps; None if unknown."""
        if len(self._recent) < 2:  # noqa: PLR2004 (a span has two ends)
            return None
        oldest, newest = self._recent[0], self._recent[-1]
        seconds = newest.stepping_seconds - oldest.stepping_seconds
        return (newest.num_samples - oldest.num_samples) / seconds if seconds > 0 else None

    def seconds_since_begin(self, seconds: float) -> float | None:
        """Return the duration of this session so far."""
        return None if self._begun is None else seconds - self._begun.seconds

    def seconds_left(self, seconds: float, num_steps_left: int) -> float | None:
        """Return the remaining time for `num_steps_left` steps, from now; None if unknown."""
        if self._first is None or self._last is None or self._last.num_steps == self._first.num_steps:
            return None
        # Wall time, because evaluations and checkpoints are still to come.
        per_step = (self._last.seconds - self._first.seconds) / (self._last.num_steps - self._first.num_steps)
        return max(0.0, per_step * num_steps_left - (seconds - self._last.seconds))

    def _end_at(self, seconds: float, num_steps: int, num_samples: int) -> _StepEnd:
        return _StepEnd(seconds, seconds - self._aside_seconds, num_steps, num_samples)
