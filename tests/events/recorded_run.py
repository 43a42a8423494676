"""Records of a run, with defaults for every field."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    MemoryRecord,
    MicroBatchRecord,
    OutOfMemoryRecord,
    Record,
    Scalar,
    SpanEvent,
    StartRecord,
    StepRecord,
)

GEOMETRY = "64 samples = 2 ranks x 2 micro-batches x 16"


class CountingTensor(torch.Tensor):
    """A tensor that counts the reads of all such tensors."""

    num_read = 0

    def item(self) -> Any:
        CountingTensor.num_read += 1
        return super().item()


def counting(value: float) -> CountingTensor:
    """Return a counting tensor, and count from 0 on."""
    CountingTensor.num_read = 0
    return torch.tensor(value).as_subclass(CountingTensor)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def start(first_step: int = 0, **changes: Any) -> StartRecord:
    """Return the start of a run."""
    record = StartRecord(
        rank=0,
        world_size=2,
        first_step=first_step,
        geometry=GEOMETRY,
        effective_batch_size=64,
        micro_batch_size=16,
        strategy="all_reduce",
        precision="fp32",
        device="cpu",
        dtype="float32",
        seed=0,
        num_parameters=1_234,
        gradient_bytes=4_936,
        versions={"anybatch": "0.1.0", "torch": "2.13.0"},
        decisions={},
    )
    return replace(record, **changes)


def micro_batch(
    step: int, position: int, event: SpanEvent = "end", num_micro_batches: int = 4, **changes: Any
) -> MicroBatchRecord:
    """Return the begin or end of a micro-batch."""
    record = MicroBatchRecord(
        rank=0,
        event=event,
        step=step,
        unit_number=position,
        position=position,
        num_micro_batches=num_micro_batches,
        num_samples=16,
        first_sample_id=0,
        weight=1.0,
        counts={},
        loss_sums={},
    )
    return replace(record, **changes)


def step(number: int, loss: Scalar = 0.5, **changes: Any) -> StepRecord:
    """Return a step."""
    record = StepRecord(
        rank=0,
        step=number,
        epoch=0,
        sample_offset=64,
        num_samples=64,
        num_micro_batches=1,
        loss=loss,
        losses={"loss": loss},
        counts={"loss": 64.0},
        gradient_norm=1.25,
        clipped=False,
        learning_rates=(0.001,),
        skipped=False,
    )
    return replace(record, **changes)


def evaluation(after: int, **metrics: Scalar) -> EvaluateRecord:
    """Return an evaluation after this many steps."""
    return EvaluateRecord(rank=0, step=after, num_samples=1_000, metrics=metrics)


def checkpoint(after: int) -> CheckpointRecord:
    """Return a saved checkpoint."""
    return CheckpointRecord(rank=0, event="saved", step=after, path="run/step", num_bytes=3 * 2**20, message=None)


def diagnosis(message: str, **changes: Any) -> DiagnosisRecord:
    """Return a diagnosis."""
    return replace(
        DiagnosisRecord(rank=0, step=None, code="code", level="warning", message=message, remedy=None), **changes
    )


def memory(number: int, **changes: Any) -> MemoryRecord:
    """Return the memory record of a step."""
    record = MemoryRecord(
        rank=0,
        step=number,
        allocated_bytes=2**20,
        reserved_bytes=None,
        peak_bytes=2**21,
        limit_bytes=None,
        category_bytes={"weights": 4_936},
    )
    return replace(record, **changes)


def out_of_memory(number: int, before: int = 16, after: int | None = 8) -> OutOfMemoryRecord:
    """Return an out-of-memory event in a step."""
    return OutOfMemoryRecord(
        rank=0,
        step=number,
        phase="forward_backward",
        micro_batch_size_before=before,
        micro_batch_size_after=after,
        message="no room",
    )


def end(num_steps: int, **changes: Any) -> EndRecord:
    """Return the end of a run."""
    record = EndRecord(rank=0, status="completed", num_steps=num_steps, message=None, digest=None)
    return replace(record, **changes)


def whole_run(num_steps: int) -> Iterator[Record]:
    """Yield the records of a run with steps only."""
    yield start()
    for number in range(num_steps):
        yield step(number, 2.0 / (1 + number))
    yield end(num_steps)
