"""Creates records of the engine's actions, and sends them to observers."""

import itertools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from anybatch.core.gradient_noise import ALL, NoiseEstimate, noise_interval
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
    StepRecord,
    StepReport,
)
from anybatch.core.torch_internals import sparse_bytes, storage_key
from anybatch.core.tree import Batch
from anybatch.core.units import Reserve, describe_reserve
from anybatch.engine.accumulate import MicroBatch
from anybatch.engine.micro_batches import CountedBatch
from anybatch.errors import warn_user
from anybatch.memory.device_memory import begin_peak, memory_in_use
from anybatch.parallel.gradient_buckets import gradient_bytes

if TYPE_CHECKING:
    from anybatch.memory.trace import Category

Level = Literal["info", "warning", "error"]
TensorsByCategory = Mapping["Category", Sequence[torch.Tensor]]
"""The tensors that stay in memory between steps, by category ("weights", "gradients", ...)."""


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of memory that tensors use; memory that several tensors share counts once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            sizes[storage_key(storage)] = storage.nbytes()
        else:
            # A sparse tensor has no single storage.
            sizes[id(tensor)] = sparse_bytes(tensor)
    return sum(sizes.values())


class Notifier:
    """Sends records of the engine's actions to observers. Without `observers`, a step does not call the notifier."""

    def __init__(self, observer: Observer | None, rank: int, loss: Loss, max_norm: float | None) -> None:
        self.observers: tuple[Observer, ...] = (observer,) if observer is not None else ()
        self._rank = rank
        self._loss = loss
        self._max_norm = max_norm
        self._step = 0
        self._counted: CountedBatch | None = None
        self._position = 0
        self._num_begun = 0
        self._reductions: list[tuple[int, int, torch.dtype, str]] = []
        self._device = torch.device("cpu")
        self._tensors: Callable[[], TensorsByCategory] | None = None
        self._gradient_bytes = 0
        self._category_bytes: Mapping[str, int] = {}
        self._has_updated = False
        self._on_batch: Callable[[Batch], None] | None = None
        self._warned: set[str] = set()

    def measure_memory(
        self, device: torch.device, parameters: Sequence[torch.Tensor], tensors: Callable[[], TensorsByCategory]
    ) -> None:
        """From now on, report the memory of the rank's device after each step."""
        self._device, self._tensors = device, tensors
        self._gradient_bytes = gradient_bytes(parameters)

    @contextmanager
    def with_observer(self, observer: Observer, on_batch: Callable[[Batch], None]) -> Iterator[None]:
        """Within the context, add an observer, and call `on_batch` with each loaded micro-batch."""
        before = self.observers, self._on_batch
        self.observers, self._on_batch = (*self.observers, observer), on_batch
        try:
            yield
        finally:
            self.observers, self._on_batch = before

    def begin_step(self, step: int, counted: CountedBatch) -> None:
        """Store the step and its batch for the records of this step."""
        self._step, self._counted, self._position, self._num_begun = step, counted, 0, 0
        if self._tensors is not None:
            begin_peak(self._device)

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
        # Count starts and ends separately: with norms="exact" all micro-batches start before the first one ends.
        self.send(self._micro_batch(micro_batch, "begin", self._num_begun, {}, {}))
        self._num_begun += 1

    def after(self, micro_batch: MicroBatch, contributions: Sequence[torch.Tensor]) -> None:
        """Report the end of a micro-batch."""
        if self._counted is None:
            return
        counts, sums = {}, {}
        values = iter(contributions)
        for name, factor in zip(self._loss.names, micro_batch.factors, strict=True):
            counts[name] = factor.count
            if factor.has_value and contributions:  # an `ab.joint` loss has no contributions per micro-batch
                contribution = next(values)
                # Divide by the factor to get the term's sum, unless the factor is 0.
                sums[name] = contribution / factor.of_sum if factor.of_sum else contribution
        self.send(self._micro_batch(micro_batch, "end", self._position, counts, sums))
        self._position += 1

    def reduction(self, bucket: int, num_bytes: int, dtype: torch.dtype, collective: str = "all_reduce") -> None:
        """Report that a collective on a gradient bucket has started."""
        self._reductions.append((bucket, num_bytes, dtype, collective))
        self.send(self._reduction("begin", bucket, num_bytes, dtype, collective))

    def reduced(self) -> None:
        """Report that all buckets are reduced."""
        for bucket in self._reductions:
            self.send(self._reduction("end", *bucket))
        self._reductions.clear()

    @contextmanager
    def gathering(self, num_bytes: int) -> Iterator[None]:
        """Report the all-gather of the ranks' outputs, for an `ab.joint` loss."""
        if self.observers:
            # As bytes, since one message contains outputs of all dtypes.
            self.send(self._reduction("begin", 0, num_bytes, torch.uint8, "all_gather"))
        yield
        if self.observers:
            self.send(self._reduction("end", 0, num_bytes, torch.uint8, "all_gather"))

    @contextmanager
    def phase(self, name: PhaseName, position: int | None = None) -> Iterator[None]:
        """Report the start and end of a phase."""
        self.send(PhaseRecord(rank=self._rank, event="begin", step=self._step, name=name, position=position))
        yield
        self.send(PhaseRecord(rank=self._rank, event="end", step=self._step, name=name, position=position))

    def step(self, report: StepReport) -> None:
        """Report the result of a step."""
        if not self.observers:
            return
        self._report_memory(report)
        if report.noise is not None:
            self.send(self._noise(report.step, report.noise))
        means = zip(report.weights.items(), report.contributions.unbind(), strict=True)
        norm = report.gradient_norm
        self.send(
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

    def _report_memory(self, report: StepReport) -> None:
        """Report the memory of the device, without waiting for it, and warn once if the headroom is used up."""
        if self._tensors is None or (usage := memory_in_use(self._device)) is None:
            return
        # Measured until the first update has created the optimizer state; later the sizes do not change.
        if not self._has_updated:
            self._has_updated = not report.skipped
            sizes: dict[str, int] = {name: num_bytes_of(tensors) for name, tensors in self._tensors().items()}
            self._category_bytes = {**sizes, "gradients": max(sizes["gradients"], self._gradient_bytes)}
        self.send(
            MemoryRecord(
                rank=self._rank,
                step=report.step,
                allocated_bytes=usage.allocated_bytes,
                reserved_bytes=usage.reserved_bytes,
                peak_bytes=usage.peak_bytes,
                limit_bytes=usage.limit_bytes,
                category_bytes=self._category_bytes,
            )
        )
        if usage.limit_bytes is None or "headroom_used_up" in self._warned:
            return
        reserve = Reserve(usage.peak_bytes, usage.limit_bytes)
        if not reserve.kept:
            self._warned.add("headroom_used_up")
            remedy = "A smaller micro_batch_size gives the same result with less memory."
            message = f"memory: {describe_reserve(reserve)}"
            self.diagnosis("headroom_used_up", message, "warning", step=report.step, remedy=remedy)

    def _noise(self, step: int, noise: NoiseEstimate) -> GradientNoiseRecord:
        scale, low, high = noise_interval(noise.moments)
        weight, norm, variance = noise.moments[0, :3].unbind()
        return GradientNoiseRecord(
            rank=self._rank,
            step=step,
            noise_scale={ALL: scale[0]},
            low={ALL: low[0]},
            high={ALL: high[0]},
            squared_norm={ALL: norm / weight},
            variance={ALL: variance / weight},
            items_per_sample=noise.items_per_sample,
        )

    def out_of_memory(self, phase: PhaseName | None, message: str | None, before: int, after: int | None) -> None:
        """Report that a step ran out of memory, and drop the stored batch."""
        self._counted = None
        self._reductions.clear()
        self.send(
            OutOfMemoryRecord(
                rank=self._rank,
                step=self._step,
                phase=phase,
                micro_batch_size_before=before,
                micro_batch_size_after=after,
                message=message,
            )
        )

    def report_halving(self, before: int, after: int) -> None:
        """Report that a micro-batch of an evaluation did not fit, with its size before and after halving."""
        message = f"out of memory in an evaluation: micro-batch {before:,} -> {after:,} samples on rank {self._rank}"
        self.diagnosis("out_of_memory_in_evaluation", message, "warning")

    def diagnosis(
        self, code: str, message: str, level: Level = "info", *, step: int | None = None, remedy: str | None = None
    ) -> None:
        """Send a diagnosis for the user."""
        self.send(DiagnosisRecord(rank=self._rank, step=step, code=code, level=level, message=message, remedy=remedy))

    def spike(self, code: str, message: str, step: int) -> None:
        """Report a spike: by a record on every rank, and by a Python warning on rank 0."""
        self.diagnosis(code, message, "warning", step=step)
        if self._rank == 0:
            warn_user(message, code)

    def warn(self, code: str, message: str, *, everywhere: bool = False) -> None:
        """Warn once per `code`: by a Python warning on rank 0 (or `everywhere`), and by a record on every rank."""
        if code in self._warned:
            return
        self._warned.add(code)
        self.diagnosis(code, message, "warning")
        if everywhere or self._rank == 0:
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
        self.send(
            CheckpointRecord(
                rank=self._rank, event=event, step=step, path=str(path), num_bytes=num_bytes, message=message
            )
        )

    def evaluate(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Report the result of an evaluation."""
        self.send(EvaluateRecord(rank=self._rank, step=step, num_samples=num_samples, metrics=dict(metrics)))

    def end(self, num_steps: int, error: BaseException | None) -> None:
        """Report the end of the run."""
        status: Literal["completed", "stopped", "failed"] = "completed"
        if error is not None:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        message = None if error is None else f"{type(error).__name__}: {error}"
        self.send(EndRecord(rank=self._rank, status=status, num_steps=num_steps, message=message, digest=None))

    def send(self, record: Record) -> None:
        """Send a record to all observers."""
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


def software_versions() -> dict[str, str]:
    """Return the versions of anybatch, torch and Python, for logs."""
    try:
        anybatch = version("anybatch")
    except PackageNotFoundError:  # run from its source tree
        anybatch = "unknown"
    return {"anybatch": anybatch, "torch": str(torch.__version__), "python": platform.python_version()}
