"""Converts events inside the engine to records for observers."""

import itertools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from anybatch.core.gradient_noise import NoiseEstimate, noise_interval
from anybatch.core.loss import Loss
from anybatch.core.records import (
    CheckpointRecord,
    DiagnosisRecord,
    EndRecord,
    EvaluateRecord,
    GradientNoiseRecord,
    MemoryRecord,
    MicroBatchRecord,
    Observer,
    OutOfMemoryRecord,
    PhaseName,
    PhaseRecord,
    Record,
    ReductionRecord,
    SpanEvent,
    StartRecord,
    StepRecord,
    StepReport,
)
from anybatch.core.torch_internals import sparse_bytes, storage_key
from anybatch.core.tree import Batch
from anybatch.core.units import Reserve, describe_reserve
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.micro_batches import CountedBatch, PlannedBatch
from anybatch.errors import warn_user
from anybatch.memory.device_memory import begin_peak, memory_in_use
from anybatch.memory.trace import Category
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.world import World

Level = Literal["info", "warning", "error"]
ResidentTensors = Mapping[Category, Sequence[torch.Tensor]]


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory of tensors; shared memory counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        else:
            # A sparse tensor has no single storage.
            sizes[id(tensor)] = sparse_bytes(tensor)
    return sum(sizes.values())


@dataclass(eq=False, repr=False)
class StepMemory:
    """Reads the memory of the device once per step, without waiting for the device."""

    device: torch.device
    rank: int
    resident: Callable[[], ResidentTensors]

    def __post_init__(self) -> None:
        self._category_bytes: Mapping[str, int] = {}
        self._optimizer_is_known = False
        self._has_warned = False

    def begin(self) -> None:
        """Reset the peak."""
        begin_peak(self.device)

    def end(self, step: int, *, gradient_bytes: int, updated: bool) -> Iterator[MemoryRecord | DiagnosisRecord]:
        """Yield the record of a step, and possibly a warning; nothing if the system does not report memory."""
        usage = memory_in_use(self.device)
        if usage is None:
            return
        # Sizes stay the same once the optimizer state exists, so they are cached.
        if not self._optimizer_is_known:
            self._optimizer_is_known = updated
            sizes: dict[str, int] = {category: num_bytes_of(tensors) for category, tensors in self.resident().items()}
            self._category_bytes = {**sizes, "gradients": max(sizes["gradients"], gradient_bytes)}
        yield MemoryRecord(
            rank=self.rank,
            step=step,
            allocated_bytes=usage.allocated_bytes,
            reserved_bytes=usage.reserved_bytes,
            peak_bytes=usage.peak_bytes,
            limit_bytes=usage.limit_bytes,
            category_bytes=self._category_bytes,
        )
        if usage.limit_bytes is None or self._has_warned:
            return
        reserve = Reserve(usage.peak_bytes, usage.limit_bytes)
        if not reserve.kept:
            self._has_warned = True
            yield DiagnosisRecord(
                rank=self.rank,
                step=step,
                code="headroom_used_up",
                level="warning",
                message=f"memory: {describe_reserve(reserve)}",
                remedy="A smaller micro_batch_size gives the same result with less memory.",
            )


class Notifier:
    """Sends records of the engine's actions to observers. Without `observers`, a step makes no calls here."""

    def __init__(
        self, observer: Observer | None, rank: int, loss: Loss, max_norm: float | None, *, speaks: bool = True
    ) -> None:
        self.observers: tuple[Observer, ...] = (observer,) if observer is not None and speaks else ()
        self._speaks = speaks
        self._rank = rank
        self._loss = loss
        self._max_norm = max_norm
        self._step = 0
        self._counted: CountedBatch | None = None
        self._position = 0
        self._num_begun = 0
        self._reductions: list[tuple[int, int, torch.dtype, str]] = []
        self._memory: StepMemory | None = None
        self._gradient_bytes = 0
        self._on_batch: Callable[[Batch], None] | None = None
        self._warned: set[str] = set()

    def measure_memory(
        self, world: World, parameters: Sequence[torch.Tensor], resident: Callable[[], ResidentTensors]
    ) -> None:
        """Report the memory of the rank's device after each step from now on."""
        self._memory = StepMemory(world.device, world.rank, resident)
        self._gradient_bytes = gradient_bytes(parameters)

    @contextmanager
    def also(self, observer: Observer, on_batch: Callable[[Batch], None]) -> Iterator[None]:
        """Add an observer temporarily, and call `on_batch` with each loaded micro-batch."""
        before = self.observers, self._on_batch
        self.observers, self._on_batch = (*self.observers, observer), on_batch
        try:
            yield
        finally:
            self.observers, self._on_batch = before

    def start(self, record: StartRecord) -> None:
        """Report that the run starts."""
        self._send(record)

    def begin_step(self, step: int, counted: CountedBatch) -> None:
        """Save the values that the records of this step refer to."""
        self._step, self._counted, self._position, self._num_begun = step, counted, 0, 0
        if self._memory is not None:
            self._memory.begin()

    def timed(self, items: Iterator[tuple[MicroBatch, Batch]]) -> Iterator[tuple[MicroBatch, Batch]]:
        """Yield the micro-batches of a step, and report the loading time of each."""
        for position in itertools.count():
            with self.phase("load", position):
                item = next(items, None)
            if item is None:
                return
            if self._on_batch is not None:
                self._on_batch(item[1])
            yield item

    def before(self, micro_batch: MicroBatch) -> None:
        """Report the start of a micro-batch."""
        # Started and finished ones are counted separately: under norms="exact" all start before the first finishes.
        self._send(self._micro_batch(micro_batch, "begin", self._num_begun, {}, {}))
        self._num_begun += 1

    def after(self, micro_batch: MicroBatch, contributions: Sequence[torch.Tensor]) -> None:
        """Report the end of a micro-batch."""
        if self._counted is None:
            return
        counts, sums = {}, {}
        values = iter(contributions)
        for name, factor in zip(self._loss.names, micro_batch.factors, strict=True):
            counts[name] = factor.count
            if factor.has_value and contributions:  # a loss across samples has none per micro-batch
                contribution = next(values)
                # Undo the factor to get the term's sum; a weight of 0 cannot be divided out.
                sums[name] = contribution / factor.of_sum if factor.of_sum else contribution
        self._send(self._micro_batch(micro_batch, "end", self._position, counts, sums))
        self._position += 1

    def reduction(self, bucket: int, num_bytes: int, dtype: torch.dtype, collective: str = "all_reduce") -> None:
        """Report that a gradient bucket was handed to a collective."""
        if self.observers:
            self._reductions.append((bucket, num_bytes, dtype, collective))
            self._send(self._reduction("begin", bucket, num_bytes, dtype, collective))

    def reduced(self) -> None:
        """Report that all buckets are reduced."""
        for bucket in self._reductions:
            self._send(self._reduction("end", *bucket))
        self._reductions.clear()

    @contextmanager
    def gathering(self, num_bytes: int) -> Iterator[None]:
        """Report the all-gather of the ranks' outputs, for a loss across samples."""
        if self.observers:
            # Outputs of all types are sent in one message, as bytes.
            self._send(self._reduction("begin", 0, num_bytes, torch.uint8, "all_gather"))
        yield
        if self.observers:
            self._send(self._reduction("end", 0, num_bytes, torch.uint8, "all_gather"))

    @contextmanager
    def phase(self, name: PhaseName, position: int | None = None) -> Iterator[None]:
        """Report the start and end of a phase."""
        self._send(PhaseRecord(rank=self._rank, event="begin", step=self._step, name=name, position=position))
        yield
        self._send(PhaseRecord(rank=self._rank, event="end", step=self._step, name=name, position=position))

    def step(self, report: StepReport) -> None:
        """Report the result of a step."""
        if not self.observers:
            return
        if self._memory is not None:
            updated = not report.skipped
            for record in self._memory.end(report.step, gradient_bytes=self._gradient_bytes, updated=updated):
                self._send(record)
        if report.noise is not None:
            self._send(self._noise(report.step, report.noise))
        means = zip(report.weights.items(), report.contributions.unbind(), strict=True)
        norm = report.gradient_norm
        self._send(
            StepRecord(
                rank=self._rank,
                step=report.step,
                epoch=report.position.epoch,
                sample_offset=report.position.sample_offset,
                num_samples=report.num_samples,
                num_micro_batches=len(report.plan.shares[self._rank]),
                loss=report.contributions.sum(),
                losses={name: value / weight if weight else value for (name, weight), value in means},
                counts=dict(zip(report.weights, report.counts.unbind(), strict=True)),
                gradient_norm=norm,
                # Compared on the device, to avoid waiting for it.
                clipped=None if self._max_norm is None or norm is None else norm > self._max_norm,
                learning_rates=report.learning_rates,
                skipped=report.skipped,
            )
        )

    def _noise(self, step: int, noise: NoiseEstimate) -> GradientNoiseRecord:
        scale, low, high = noise_interval(noise.moments)
        weight, norms, variances = noise.moments[:, 0], noise.moments[:, 1], noise.moments[:, 2]

        def by_name(values: torch.Tensor) -> dict[str, torch.Tensor]:
            return dict(zip(noise.names, values.unbind(), strict=True))

        return GradientNoiseRecord(
            rank=self._rank,
            step=step,
            noise_scale=by_name(scale),
            low=by_name(low),
            high=by_name(high),
            squared_norm=by_name(norms / weight),
            variance=by_name(variances / weight),
            items_per_sample=noise.items_per_sample,
        )

    def out_of_memory(self, phase: PhaseName | None, message: str | None, before: int, after: int | None) -> None:
        """Report that a step ran out of memory, and drop its saved values."""
        self._counted = None
        self._reductions.clear()
        self._send(
            OutOfMemoryRecord(
                rank=self._rank,
                step=self._step,
                phase=phase,
                micro_batch_size_before=before,
                micro_batch_size_after=after,
                message=message,
            )
        )

    def halved(self, before: int, after: int) -> None:
        """Report that a micro-batch of an evaluation did not fit."""
        message = f"out of memory in an evaluation: micro-batch {before:,} -> {after:,} samples on rank {self._rank}"
        self.diagnosis("out_of_memory_in_evaluation", message, "warning")

    def diagnosis(self, code: str, message: str, level: Level = "info", *, step: int | None = None) -> None:
        """Send a diagnosis for the user."""
        self._send(DiagnosisRecord(rank=self._rank, step=step, code=code, level=level, message=message, remedy=None))

    def spike(self, code: str, message: str, step: int) -> None:
        """Report a spike: by a record on every rank, and by a Python warning on rank 0."""
        self.diagnosis(code, message, "warning", step=step)
        if self._speaks and self._rank == 0:
            warn_user(message, code)

    def warn(self, code: str, message: str, *, everywhere: bool = False) -> None:
        """Warn once per `code`: by a Python warning on rank 0 (or `everywhere`), and by a record on every rank."""
        if code in self._warned:
            return
        self._warned.add(code)
        self.diagnosis(code, message, "warning")
        if self._speaks and (everywhere or self._rank == 0):
            warn_user(message, code)

    def checkpoint(
        self,
        event: Literal["saved", "loaded", "fell_back"],
        step: int,
        path: Path,
        num_bytes: int | None,
        message: str | None = None,
    ) -> None:
        """Report that a checkpoint was written, read or skipped."""
        self._send(
            CheckpointRecord(
                rank=self._rank, event=event, step=step, path=str(path), num_bytes=num_bytes, message=message
            )
        )

    def evaluate(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Report the result of an evaluation."""
        self._send(EvaluateRecord(rank=self._rank, step=step, num_samples=num_samples, metrics=dict(metrics)))

    def end(self, num_steps: int, error: BaseException | None) -> None:
        """Report the end of the run."""
        status: Literal["completed", "stopped", "failed"] = "completed"
        if error is not None:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        message = None if error is None else f"{type(error).__name__}: {error}"
        self._send(EndRecord(rank=self._rank, status=status, num_steps=num_steps, message=message, digest=None))

    def _send(self, record: Record) -> None:
        for observer in self.observers:
            observer.observe(record)

    def _micro_batch(
        self,
        micro_batch: MicroBatch,
        event: SpanEvent,
        position: int,
        counts: Mapping[str, float],
        loss_sums: Mapping[str, torch.Tensor],
    ) -> MicroBatchRecord:
        assert self._counted is not None
        return MicroBatchRecord(
            rank=self._rank,
            event=event,
            step=self._step,
            unit_number=micro_batch.unit.number,
            position=position,
            num_micro_batches=len(self._counted.planned.units),
            num_samples=micro_batch.unit.num_samples,
            first_sample_id=int(self._counted.planned.sample_ids[micro_batch.unit.start]),
            weight=micro_batch.unit.weight,
            counts=counts,
            loss_sums=loss_sums,
        )

    def _reduction(
        self, event: SpanEvent, bucket: int, num_bytes: int, dtype: torch.dtype, collective: str
    ) -> ReductionRecord:
        return ReductionRecord(
            rank=self._rank,
            event=event,
            step=self._step,
            bucket=bucket,
            collective=collective,
            payload="other" if collective == "all_gather" else "gradients",
            num_bytes=num_bytes,
            dtype=str(dtype).removeprefix("torch."),
        )


def start_record(
    *,
    world: World,
    planned: PlannedBatch,
    parameters: Sequence[torch.Tensor],
    strategy: str,
    precision: str,
    first_step: int,
    decisions: Mapping[str, str],
) -> StartRecord:
    """Return the header of a run, sent after the first batch is planned."""
    return StartRecord(
        rank=world.rank,
        world_size=world.size,
        first_step=first_step,
        geometry=str(planned.plan),
        effective_batch_size=planned.plan.num_samples,
        micro_batch_size=planned.plan.cut.micro_batch_size,
        strategy=strategy,
        precision=precision,
        device=str(world.device),
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        seed=planned.seed,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        gradient_bytes=gradient_bytes(parameters),
        versions=software_versions(),
        decisions=dict(decisions),
    )


def software_versions() -> dict[str, str]:
    """Return the versions of anybatch, torch and Python, for logs."""
    try:
        anybatch = version("anybatch")
    except PackageNotFoundError:  # run from its source tree
        anybatch = "unknown"
    return {"anybatch": anybatch, "torch": str(torch.__version__), "python": platform.python_version()}
