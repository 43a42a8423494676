"""From events inside the engine to records for an observer; next to free where there is no observer."""

import itertools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    MicroBatchRecord,
    Observer,
    Observers,
    OutOfMemoryRecord,
    PhaseName,
    PhaseRecord,
    Record,
    ReductionRecord,
    SpanEvent,
    StartRecord,
    StepRecord,
)
from anybatch.core.reports import StepReport
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.accumulate import MicroBatch
from anybatch.engine.accumulation.planned_batch import CountedBatch, PlannedBatch
from anybatch.engine.telemetry.step_memory import StepMemory
from anybatch.engine.update.clipping import ClipByNorm, ClipPolicy
from anybatch.engine.update.resident_tensors import ResidentTensors
from anybatch.errors import warn_user
from anybatch.parallel.gradient_buckets import gradient_bytes
from anybatch.parallel.world import World

# One object for all phases: without an observer a phase costs next to nothing.
_NOTHING = nullcontext()


class Notifier:
    """Sends an observer records of what the engine does. Every method returns at once when there is none.

    Args:
        observer: gets them.
        rank: this rank.
        loss: the declared loss.
        clip: the clipping policy.
        speaks: whether this process speaks for its rank; of several that are one rank the others send nothing.
    """

    def __init__(
        self, observer: Observer | None, rank: int, loss: Loss, clip: ClipPolicy | None, *, speaks: bool = True
    ) -> None:
        self._observer = observer if speaks else None
        self._speaks = speaks
        self._rank = rank
        self._loss = loss
        self._clip = clip
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
        """Report from now on what each step takes of the rank's device."""
        self._memory = StepMemory(world.device, world.rank, resident)
        self._gradient_bytes = gradient_bytes(parameters)

    @contextmanager
    def also(self, observer: Observer, on_batch: Callable[[Batch], None]) -> Iterator[None]:
        """Let one more observer look in, and `on_batch` see each micro-batch when it is loaded."""
        before = self._observer, self._on_batch
        self._observer = observer if self._observer is None else Observers(self._observer, observer)
        self._on_batch = on_batch
        try:
            yield
        finally:
            self._observer, self._on_batch = before

    @property
    def has_observer(self) -> bool:
        """Whether there is an observer."""
        return self._observer is not None

    def start(self, record: StartRecord) -> None:
        """Report that the run starts."""
        self._send(record)

    def begin_step(self, step: int, counted: CountedBatch) -> None:
        """Remember what the records of this step refer to."""
        self._step, self._counted, self._position, self._num_begun = step, counted, 0, 0
        if self._observer is not None and self._memory is not None:
            self._memory.begin()

    def with_load_events(self, counted: CountedBatch) -> Iterator[tuple[MicroBatch, Batch]]:
        """Return the micro-batches of a step, and report how long each takes to load."""
        return counted.micro_batches if self._observer is None else self._timed(counted.micro_batches)

    def _timed(self, items: Iterator[tuple[MicroBatch, Batch]]) -> Iterator[tuple[MicroBatch, Batch]]:
        for position in itertools.count():
            with self.phase("load", position):
                item = next(items, None)
            if item is None:
                return
            if self._on_batch is not None:
                self._on_batch(item[1])
            yield item

    def before(self, micro_batch: MicroBatch) -> None:
        """Report that a micro-batch begins."""
        if self._observer is not None:
            # Counted apart from those that are over: under norms="exact" all have begun before the first is over.
            self._send(self._micro_batch(micro_batch, "begin", self._num_begun, {}, {}))
            self._num_begun += 1

    def after(self, micro_batch: MicroBatch, contributions: Sequence[torch.Tensor]) -> None:
        """Report that a micro-batch is over."""
        if self._observer is None or self._counted is None:
            return
        counts, sums = {}, {}
        values = iter(contributions)
        for name, factor in zip(self._loss.names, micro_batch.factors, strict=True):
            counts[name] = factor.count
            if factor.has_value and contributions:  # a loss across samples has none of a micro-batch
                contribution = next(values)
                # Back from the contribution to the term's own sum; a weight of 0 cannot be divided out.
                sums[name] = contribution / factor.of_sum if factor.of_sum else contribution
        self._send(self._micro_batch(micro_batch, "end", self._position, counts, sums))
        self._position += 1

    def reduction(self, bucket: int, num_bytes: int, dtype: torch.dtype, collective: str = "all_reduce") -> None:
        """Report that a gradient bucket was handed to a collective."""
        if self._observer is not None:
            self._reductions.append((bucket, num_bytes, dtype, collective))
            self._send(self._reduction("begin", bucket, num_bytes, dtype, collective))

    def reduced(self) -> None:
        """Report that all buckets have arrived."""
        for bucket in self._reductions:
            self._send(self._reduction("end", *bucket))
        self._reductions.clear()

    @contextmanager
    def gathering(self, num_bytes: int) -> Iterator[None]:
        """Report that the outputs of all ranks are brought together, for a loss across samples."""
        if self._observer is not None:
            # Outputs of all types travel in one message, as bytes.
            self._send(self._reduction("begin", 0, num_bytes, torch.uint8, "all_gather"))
        yield
        if self._observer is not None:
            self._send(self._reduction("end", 0, num_bytes, torch.uint8, "all_gather"))

    def phase(self, name: PhaseName, position: int | None = None) -> AbstractContextManager[None]:
        """Report when a phase begins and ends."""
        return _NOTHING if self._observer is None else self._sent_phase(name, position)

    @contextmanager
    def _sent_phase(self, name: PhaseName, position: int | None) -> Iterator[None]:
        self._send(PhaseRecord(rank=self._rank, event="begin", step=self._step, name=name, position=position))
        yield
        self._send(PhaseRecord(rank=self._rank, event="end", step=self._step, name=name, position=position))

    def step(self, report: StepReport) -> None:
        """Report what a step did."""
        if self._observer is None:
            return
        if self._memory is not None:
            updated = not report.skipped
            for record in self._memory.end(report.step, gradient_bytes=self._gradient_bytes, updated=updated):
                self._send(record)
        if report.noise is not None:
            self._send(self._noise(report.step, report.noise))
        means = zip(report.weights.items(), report.contributions.unbind(), strict=True)
        norm = report.gradient_norm
        by_norm = self._clip.max_norm if isinstance(self._clip, ClipByNorm) else None
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
                # Compared on the device, so that nothing waits for it here.
                clipped=None if by_norm is None or norm is None else norm > by_norm,
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
        """Report that a step ran out of memory, and drop what was remembered of it."""
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

    def diagnosis(
        self,
        code: str,
        message: str,
        level: Literal["info", "warning", "error"] = "info",
        *,
        step: int | None = None,
    ) -> None:
        """Report something the user should know."""
        self._send(DiagnosisRecord(rank=self._rank, step=step, code=code, level=level, message=message, remedy=None))

    def spike(self, code: str, message: str, step: int) -> None:
        """Report a spike: by a record on every rank, and by a Python warning on rank 0."""
        self.diagnosis(code, message, "warning", step=step)
        if self._speaks and self._rank == 0:
            warn_user(message)

    def warn(self, code: str, message: str, *, everywhere: bool = False) -> None:
        """Warn the user, on rank 0 and once per `code`: by a Python warning, and by a diagnosis record on every rank.

        Args:
            code: names the condition, for programs.
            message: what might not be meant, both values, and what to do.
            everywhere: give the Python warning on other ranks too, which alone may know.
        """
        if code in self._warned:
            return
        self._warned.add(code)
        self.diagnosis(code, message, "warning")
        if self._speaks and (everywhere or self._rank == 0):
            warn_user(message)

    def checkpoint(
        self,
        event: Literal["saved", "loaded", "fell_back"],
        step: int,
        path: Path,
        num_bytes: int | None,
        message: str | None = None,
    ) -> None:
        """Report that a checkpoint was written, read or passed over."""
        self._send(
            CheckpointRecord(
                rank=self._rank, event=event, step=step, path=str(path), num_bytes=num_bytes, message=message
            )
        )

    def evaluate(self, step: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Report the result of an evaluation."""
        self._send(EvaluateRecord(rank=self._rank, step=step, num_samples=num_samples, metrics=dict(metrics)))

    def end(self, num_steps: int, error: BaseException | None) -> None:
        """Report that the run is over."""
        status: Literal["completed", "stopped", "failed"] = "completed"
        if error is not None:
            status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        message = None if error is None else f"{type(error).__name__}: {error}"
        self._send(EndRecord(rank=self._rank, status=status, num_steps=num_steps, message=message, digest=None))

    def _send(self, record: Record) -> None:
        if self._observer is not None:
            self._observer.observe(record)

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
    """Return the header of a run, sent when its first batch has been planned."""
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
    """Return the versions a reader of a log needs to make sense of it."""
    try:
        own = version("anybatch")
    except PackageNotFoundError:  # run from its source tree
        own = "unknown"
    return {"anybatch": own, "torch": str(torch.__version__), "python": platform.python_version()}
