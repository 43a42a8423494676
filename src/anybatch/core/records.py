"""The twelve kinds of records that an observer of a run receives, each for one kind of event.

The engine passes a frozen record of every event to its observer, when the event happens. Records hold no times: an
observer that needs times reads the clock when it receives a record, so a span has a "begin" and an "end" record.
Numbers may still be on the device, and reading one waits for the device. Tensors and mappings in a record never change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.batch import Position
from anybatch.core.gradient_noise import NoiseEstimate
from anybatch.core.splitting import BatchPlan

Scalar = float | torch.Tensor
"""A number, or a detached tensor of one element on any device."""
Flag = bool | torch.Tensor
"""A truth value, or a boolean tensor of one element on any device."""
SpanEvent = Literal["begin", "end"]
PhaseName = Literal["load", "forward_backward", "reduce", "clip", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """A run starts, or resumes from a checkpoint. The record holds the settings of the steps that follow.

    Attributes:
        rank: the reporting rank.
        world_size: number of ranks.
        first_step: number of the next step, 0 unless resumed. If a log has earlier records of this or later steps,
            ignore them: the run repeats these steps.
        geometry: how an effective batch is split, in one line.
        effective_batch_size: samples per step over all ranks; None: the size of each batch.
        micro_batch_size: maximum samples of one forward and backward; None for no limit.
        strategy: the strategy that sums gradients over ranks.
        precision: the number formats of the forward and backward.
        device: type and name of this rank's device.
        dtype: the number format of the parameters.
        seed: seed of the run; None if the engine has no seed.
        num_parameters: number of trainable scalars in the model.
        gradient_bytes: bytes of one copy of all gradients.
        versions: versions of the software, by name.
        decisions: automatic choices of the engine, each with its reason, by name.
    """

    kind: ClassVar[str] = "start"
    rank: int
    world_size: int
    first_step: int
    geometry: str
    effective_batch_size: int | None
    micro_batch_size: int | None
    strategy: str
    precision: str
    device: str
    dtype: str
    seed: int | None
    num_parameters: int
    gradient_bytes: int
    versions: Mapping[str, str]
    decisions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchRecord:
    """A micro-batch begins, or its backward has ended (on the host: the device may still be working).

    Attributes:
        rank: the rank that runs the micro-batch.
        event: "begin" or "end" of the span.
        step: number of the step, from 0 on.
        unit_number: number of the micro-batch in the effective batch, over all ranks.
        position: index of the micro-batch on this rank in this step, from 0 on.
        num_micro_batches: micro-batches of this rank in this step.
        num_samples: samples of the micro-batch.
        first_sample_id: global id of its first sample; None if the batch has no ids.
        weight: 1, or 0 for a filler that only keeps ranks in lockstep.
        counts: number of items in the micro-batch, by loss term; empty until known.
        loss_sums: sum over these items, by loss term; empty in a "begin" record.
    """

    kind: ClassVar[str] = "micro_batch"
    rank: int
    event: SpanEvent
    step: int
    unit_number: int
    position: int
    num_micro_batches: int
    num_samples: int
    first_sample_id: int | None
    weight: float
    counts: Mapping[str, Scalar]
    loss_sums: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionRecord:
    """A collective of the default process group starts, or has finished. The record may come from a hook's thread.

    Attributes:
        rank: the rank that takes part.
        event: "begin" or "end" of the span.
        step: number of the step, from 0 on.
        bucket: number of the bucket, from 0 on, in launch order within the step.
        collective: name of the collective, such as all_reduce, reduce_scatter or all_gather.
        payload: the kind of data: the gradients that each step must send once, parameters, or "other" data.
        num_bytes: bytes sent by this rank.
        dtype: number format of the data.
    """

    kind: ClassVar[str] = "reduction"
    rank: int
    event: SpanEvent
    step: int
    bucket: int
    collective: str
    payload: Literal["gradients", "parameters", "other"]
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """A phase of a step begins or ends on the host. Phases may overlap: the next micro-batch loads during a forward.

    Attributes:
        rank: the rank of the phase.
        event: "begin" or "end" of the span.
        step: number of the step, from 0 on.
        name: name of the phase.
        position: index of the phase's micro-batch, from 0 on; None for a phase of the whole step.
    """

    kind: ClassVar[str] = "phase"
    rank: int
    event: SpanEvent
    step: int
    name: PhaseName
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """An optimizer step has finished. Losses and counts are over the effective batch, and equal on every rank.

    Attributes:
        rank: the reporting rank.
        step: number of the step, from 0 on.
        epoch: epoch of the data position after the step.
        sample_offset: samples of that epoch used so far, over all ranks.
        num_samples: samples of the effective batch, over all ranks.
        num_micro_batches: micro-batches of this rank in this step.
        loss: weighted sum of the terms' means, whose gradient the step used.
        losses: mean over the effective batch, by loss term.
        counts: number of items in the effective batch, by loss term.
        gradient_norm: norm of the gradient before clipping; None if not computed.
        clipped: whether clipping made the gradient smaller; None if clipping is off.
        learning_rates: rate of each parameter group in this step.
        skipped: whether the update was skipped because the gradient was not finite.
    """

    kind: ClassVar[str] = "step"
    rank: int
    step: int
    epoch: int
    sample_offset: int
    num_samples: int
    num_micro_batches: int
    loss: Scalar
    losses: Mapping[str, Scalar]
    counts: Mapping[str, Scalar]
    gradient_norm: Scalar | None
    clipped: Flag | None
    learning_rates: tuple[Scalar, ...]
    skipped: Flag


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoiseRecord:
    """The gradient noise, averaged over the measured steps so far; sent before the `StepRecord` of the same step.

    Each mapping has one entry, "all parameters". The noise scale is only an estimate of the critical batch size.

    Attributes:
        rank: the reporting rank.
        step: number of the step, from 0 on.
        noise_scale: variance / squared norm, in samples; use it only with its interval.
        low: lower end of the 95% interval of the noise scale.
        high: upper end of this interval; infinite while only a lower bound is known.
        squared_norm: squared norm of the gradient over all data.
        variance: variance of the gradient of one sample.
        items_per_sample: items of the loss (tokens, say) per sample of this step.
    """

    kind: ClassVar[str] = "gradient_noise"
    rank: int
    step: int
    noise_scale: Mapping[str, Scalar]
    low: Mapping[str, Scalar]
    high: Mapping[str, Scalar]
    squared_norm: Mapping[str, Scalar]
    variance: Mapping[str, Scalar]
    items_per_sample: Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """The memory of a rank's device at the end of a step; sent before the `StepRecord` of the same step.

    Attributes:
        rank: the rank of the device.
        step: number of the step, from 0 on.
        allocated_bytes: bytes of live tensors; on a CPU, of the whole process.
        reserved_bytes: bytes reserved by the caching allocator; None on a device without a caching allocator.
        peak_bytes: peak of live tensors in this step; on a CPU, peak of the process since its start.
        limit_bytes: memory of the device, or the run's limit; None for no limit.
        category_bytes: bytes of tensors between steps, by category (weights, buffers, gradients, optimizer).
    """

    kind: ClassVar[str] = "memory"
    rank: int
    step: int
    allocated_bytes: int
    reserved_bytes: int | None
    peak_bytes: int
    limit_bytes: int | None
    category_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisRecord:
    """A finding about the run for the user.

    Attributes:
        rank: the rank of the finding.
        step: number of the step; None if the finding is not about a step.
        code: name of the finding in the documentation, the same in every run.
        level: severity; an error ends the run.
        message: the finding, with numbers.
        remedy: the fix; None if none is needed.
    """

    kind: ClassVar[str] = "diagnosis"
    rank: int
    step: int | None
    code: str
    level: Literal["info", "warning", "error"]
    message: str
    remedy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateRecord:
    """An evaluation has finished.

    Attributes:
        rank: the reporting rank.
        step: number of steps before the evaluation.
        num_samples: evaluated samples, over all ranks.
        metrics: value of each metric over these samples, by name.
    """

    kind: ClassVar[str] = "evaluate"
    rank: int
    step: int
    num_samples: int
    metrics: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """A checkpoint was written or read.

    Attributes:
        rank: the reporting rank.
        event: "fell_back" means that this checkpoint could not be read, and that the previous checkpoint is tried.
        step: number of steps before the checkpoint.
        path: path of the checkpoint.
        num_bytes: size of the checkpoint on disk; None if unknown.
        message: why the checkpoint could not be read; None for other events.
    """

    kind: ClassVar[str] = "checkpoint"
    rank: int
    event: Literal["saved", "loaded", "fell_back"]
    step: int
    path: str
    num_bytes: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemoryRecord:
    """A step ran out of memory on at least one rank. It is retried with smaller micro-batches on all ranks.

    Attributes:
        rank: the reporting rank.
        step: number of the step, from 0 on; earlier records of its micro-batches are invalid.
        phase: the phase that ran out of memory; None if only other ranks ran out of memory.
        micro_batch_size_before: maximum samples of a micro-batch until now.
        micro_batch_size_after: maximum samples of a micro-batch from now on; None if no smaller size can help.
        message: the allocator's message; None if only other ranks ran out of memory.
    """

    kind: ClassVar[str] = "out_of_memory"
    rank: int
    step: int
    phase: PhaseName | None
    micro_batch_size_before: int
    micro_batch_size_after: int | None
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """A run has ended. A run whose last record is of another kind was killed.

    Attributes:
        rank: the reporting rank.
        status: completed, stopped on request, or failed.
        num_steps: steps since the beginning of the run, including the steps before a resume.
        message: why it stopped or failed; None if it completed.
        digest: digest of the final parameters; None if not computed.
    """

    kind: ClassVar[str] = "end"
    rank: int
    status: Literal["completed", "stopped", "failed"]
    num_steps: int
    message: str | None
    digest: str | None


Record = (
    StartRecord
    | MicroBatchRecord
    | ReductionRecord
    | PhaseRecord
    | StepRecord
    | GradientNoiseRecord
    | MemoryRecord
    | DiagnosisRecord
    | EvaluateRecord
    | CheckpointRecord
    | OutOfMemoryRecord
    | EndRecord
)
"""Any record. Later versions may add kinds and fields: an observer should ignore kinds that it does not handle."""


class Observer(Protocol):
    """Receives the records of a run. It may block, to pause or single-step the run, but it cannot change results."""

    def observe(self, record: Record, /) -> None:
        """Handle one record, possibly in the thread of a backward hook. An exception ends the run."""
        ...


class Observers:
    """Passes each record to several observers, in the order given."""

    __slots__ = ("_observers",)

    def __init__(self, *observers: Observer) -> None:
        """Store the observers in calling order."""
        self._observers = observers

    def observe(self, record: Record, /) -> None:
        """Pass the record to every observer; if one raises, later observers do not receive the record."""
        # Do not catch exceptions: a run whose log cannot be written should end.
        for observer in self._observers:
            observer.observe(record)


# eq=False: comparing two reports would compare tensors, and wait for the device.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepReport:
    """The result of one optimizer step. Reading a number waits for the device; not reading it costs nothing.

    Attributes:
        step: number of this step, from 0 on.
        plan: the units (numbered micro-batches) of each rank.
        position: position in the data after the step.
        learning_rates: rate of each parameter group in this step.
        skipped: whether the update was skipped on all ranks, because fp16 gradients overflowed, or because the gradient
            was not finite and a spike watch restores an earlier state.
        update: how gradients reached the parameters: "direct", "master_weights", "cast", "split" or "stochastic".
        contributions: tensor (terms,): weight x mean of each loss term over the whole effective batch.
        weights: weight of each loss term, by name.
        counts: tensor (terms,): items of each term over the whole effective batch.
        gradient_norm: scalar tensor, the 2-norm over all gradients before clipping; None if not measured.
        noise: the gradient noise, averaged over the steps up to this step; None if this step did not measure it.
        too_large: micro-batch sizes that ran out of memory in this step, in order; the step was retried after each, and
            `plan` is the split that succeeded.
    """

    step: int
    plan: BatchPlan
    position: Position
    learning_rates: tuple[float | torch.Tensor, ...]
    skipped: bool
    update: str
    contributions: Float[Tensor, " term"]
    weights: Mapping[str, float]
    counts: Float[Tensor, " term"]
    gradient_norm: Float[Tensor, ""] | None
    noise: NoiseEstimate | None = None
    too_large: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """Return the report as a paragraph; reading its numbers waits for the device."""
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.losses.items())
        rates = ", ".join(f"{float(rate):.4g}" for rate in dict.fromkeys(self.learning_rates))
        sizes = ", ".join(map(str, self.too_large))
        parts = (
            f"loss {self.loss:.4g}" + f" ({terms})" * (len(self.weights) > 1),
            "" if self.gradient_norm is None else f"gradient norm {self.grad_norm:.4g}",
            f"learning rate {rates}",
            str(self.plan),
            f"next: epoch {self.position.epoch}, sample {self.position.sample_offset}",
            "update skipped" if self.skipped else "",
            f"repeated after out-of-memory errors with micro-batches of {sizes}" if sizes else "",
        )
        return f"step {self.step}: {', '.join(filter(None, parts))}"

    @property
    def loss(self) -> float:
        """The loss of the whole effective batch, over all ranks."""
        return float(self.contributions.sum())

    @property
    def losses(self) -> dict[str, float]:
        """The mean of each term over the whole effective batch; NaN for a term of weight 0 or without items."""
        values = self.contributions.tolist()
        return {
            name: value / weight if weight and count else float("nan")
            for (name, weight), value, count in zip(self.weights.items(), values, self.counts.tolist(), strict=True)
        }

    @property
    def grad_norm(self) -> float | None:
        """The gradient norm before clipping, as a number."""
        return None if self.gradient_norm is None else float(self.gradient_norm)

    @property
    def num_samples(self) -> int:
        """Samples of the effective batch, over all ranks."""
        return self.plan.num_samples
