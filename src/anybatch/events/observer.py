"""Shared by observers: closing in a `with`, reading numbers from devices, records as sentences, and a run's speed."""

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
        """Write the remaining data, and release files and the terminal. Closing twice is allowed."""

    def __enter__(self) -> Self:
        """Return the observer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the observer."""
        self.close()


def read_number(value: Scalar | Flag) -> float | None:
    """Return a tensor or number as a float, waiting for its device; None if the device failed (reported elsewhere)."""
    with contextlib.suppress(RuntimeError):
        return float(value.item() if isinstance(value, torch.Tensor) else value)
    return None


Level = Literal["plain", "result", "warning", "error"]
Sentence = tuple[str, Level]
_DIAGNOSES: Mapping[str, tuple[str, Level]] = MappingProxyType(
    {"info": ("note", "plain"), "warning": ("warning", "warning"), "error": ("error", "error")}
)
_MAX_LISTED_STEPS = 5


def step_of(num_steps: int, total_steps: int | None) -> str:
    """Return `step 1,234 of 5,000`, or `step 1,234` without a total, padded to a constant width."""
    if total_steps is None:
        return f"step {num_steps:>7,}"
    total = f"{total_steps:,}"
    return f"step {f'{num_steps:,}':>{len(total)}} of {total}"


def lines_of_start(record: StartRecord) -> Iterator[str]:
    """Yield lines about the start of a run: its sizes, device, versions, and the engine's automatic choices."""
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
    """Return a record as a sentence, with its level; `seconds` is the duration of the session, for an `EndRecord`."""
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
    """Return the warning about steps whose update was skipped."""
    start = f"{step_of(numbers[-1], total_steps)}   warning: update skipped, because the gradient was not finite"
    if len(numbers) == 1:
        return start
    listed = ", ".join(f"{number:,}" for number in numbers[:_MAX_LISTED_STEPS])
    more = f" and {len(numbers) - _MAX_LISTED_STEPS:,} more" * (len(numbers) > _MAX_LISTED_STEPS)
    return f"{start}, in {len(numbers):,} steps: {listed}{more}"


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
        text = f"error: out of memory {phase} at {before:,} samples per micro-batch, which cannot be made smaller"
        return f"{where}   {text}", "error"
    text = f"warning: out of memory {phase}: micro-batch {before:,} -> {after:,} samples, repeating the step"
    return f"{where}   {text}", "warning"


def _about_end(record: EndRecord, seconds: float | None) -> Sentence:
    steps = f"{record.num_steps:,} step{'s' * (record.num_steps != 1)}"
    took = "" if seconds is None else f" after {duration(seconds)}"
    if record.status != "failed":
        return f"{record.status}{took}, {steps}", "result"
    # Only the first line, because this is one sentence.
    reason = "" if record.message is None else f": {record.message.strip().partition(chr(10))[0]}"
    return f"failed{took}, {steps}{reason}", "error"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


_WINDOW_SECONDS = 10.0


class Throughput:
    """The speed of a session (a run since its start or last resume), from the times at which its steps end.

    Samples per second are the mean over the last 10 seconds, or over the last step if it took longer, without the time
    of evaluations and checkpoints. The remaining time includes evaluations and checkpoints. From the second step on,
    the first step is ignored, because it allocates and compiles.
    """

    def __init__(self) -> None:
        self._begun: float | None = None
        self._last_seconds = 0.0
        self._other_seconds = 0.0
        self._num_steps = self._num_samples = 0
        self._step_ends: list[float] = []  # the times at which the first and the last step ended
        self._recent: deque[tuple[float, int]] = deque()  # (end of a step minus other work, samples so far)

    def begin(self, now: float) -> None:
        """Record the time at which the first step begins."""
        self._begun = self._last_seconds = now
        self._recent.append((now, 0))

    def step(self, now: float, num_samples: int) -> None:
        """Record the end of a step, and its samples over all ranks."""
        if self._begun is None:
            self.begin(now)
        self._last_seconds = now
        self._num_steps += 1
        self._num_samples += num_samples
        self._step_ends[1:] = [now]
        self._recent.append((now - self._other_seconds, self._num_samples))
        if self._num_steps == 2:  # noqa: PLR2004 (from the second step on, the first step is ignored)
            self._recent.popleft()
        # One step that is older than the window is kept, so that the steps cover the whole window.
        while len(self._recent) > 2 and self._recent[1][0] <= self._recent[-1][0] - _WINDOW_SECONDS:  # noqa: PLR2004
            self._recent.popleft()

    def other_work(self, now: float) -> None:
        """Record the end of an evaluation or checkpoint."""
        if self._begun is not None:
            self._other_seconds += now - self._last_seconds
            self._last_seconds = now

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second during steps; None if unknown."""
        if not self._recent:
            return None
        (first, samples_before), (last, samples) = self._recent[0], self._recent[-1]
        return (samples - samples_before) / (last - first) if last > first else None

    def seconds_since_begin(self, now: float) -> float | None:
        """Return the duration of this session so far."""
        return None if self._begun is None else now - self._begun

    def seconds_left(self, now: float, num_steps_left: int) -> float | None:
        """Return the remaining time for `num_steps_left` steps, from now; None if unknown."""
        if self._begun is None or not self._num_steps:
            return None
        first, last = (self._begun, self._step_ends[0]) if self._num_steps == 1 else self._step_ends
        # Includes evaluations and checkpoints, because the remaining steps will have them too.
        per_step = (last - first) / max(1, self._num_steps - 1)
        return max(0.0, per_step * num_steps_left - (now - last))
