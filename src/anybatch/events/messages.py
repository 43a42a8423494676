"""Records as sentences."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    OutOfMemoryRecord,
    Record,
    StartRecord,
)
from anybatch.core.units import duration, in_bytes, three_digits
from anybatch.events.observer import read_number

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
