"""Chapter 9: a run as its observer sees it. One seam, one method, twelve kinds of record.

The engine hands its observer a frozen record for everything that happens, as it happens. Records hold no times: an
observer that needs times takes them on arrival, so a span comes as a "begin" and an "end" record. Numbers may
still be on the device: reading one waits for the device, so an observer reads late, or never. Tensors and mappings in a
record do not change after it was handed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch

Scalar = float | torch.Tensor
"""A number, or a detached tensor of one element on any device."""
Flag = bool | torch.Tensor
"""A truth value, or a boolean tensor of one element on any device."""
SpanEvent = Literal["begin", "end"]
PhaseName = Literal["load", "forward_backward", "reduce", "clip", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """A run starts, or goes on from a checkpoint. The header of all records after it.

    Attributes:
        rank: the rank that reports this.
        world_size: number of ranks.
        first_step: number of the next step, 0 unless resumed; what earlier records say of this step and later ones
            was undone.
        geometry: how an effective batch is cut, in one line.
        effective_batch_size: samples per step over all ranks; None for as many as a batch brings.
        micro_batch_size: most samples of one forward and backward; None for no limit.
        strategy: how gradients are summed over ranks.
        precision: the number formats of the forward and backward.
        device: type and name of this rank's device.
        dtype: the number format of the parameters.
        seed: seed of the run; None if the engine does not know it.
        num_parameters: trainable numbers of the model.
        gradient_bytes: bytes of one copy of its gradients.
        versions: name of a piece of software to its version.
        decisions: name of what the engine decided to the decision and its reason.
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
    """A micro-batch begins, or its backward is over (on the host: the device may still be at work).

    Attributes:
        rank: the rank that runs it.
        event: which end of the span this is.
        step: number of the step, from 0 on.
        unit_number: number of its unit in the effective batch.
        position: its place among the micro-batches of this rank and step, from 0 on.
        num_micro_batches: micro-batches of this rank in this step.
        num_samples: samples in it.
        first_sample_id: global id of its first sample; None if the batch has no ids.
        weight: 1, or 0 if it only keeps ranks in lockstep and adds nothing.
        counts: term of the loss to the number of its items here; empty while they are not known.
        loss_sums: term of the loss to its sum over these items; empty at the beginning.
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
    """A collective is handed to the data group, or found to be finished. May come from a backward hook's thread.

    Attributes:
        rank: the rank that takes part.
        event: which end of the span this is.
        step: number of the step, from 0 on.
        bucket: number of the bucket, from 0 on, in the order they are handed over within the step.
        collective: such as all_reduce, reduce_scatter or all_gather.
        payload: what travels; gradients are what a step needs once, everything else is listed beside it.
        num_bytes: bytes this rank hands over.
        dtype: the number format in which they travel.
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
        rank: the rank it happens on.
        event: which end of the span this is.
        step: number of the step, from 0 on.
        name: the phase.
        position: the micro-batch it belongs to, from 0 on; None if it belongs to the step.
    """

    kind: ClassVar[str] = "phase"
    rank: int
    event: SpanEvent
    step: int
    name: PhaseName
    position: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """An optimizer step is over: its numbers for the effective batch, the same on every rank.

    Attributes:
        rank: the rank that reports this.
        step: number of the step, from 0 on.
        epoch: epoch the data stands in after the step.
        sample_offset: samples of that epoch that have made a step, over all ranks.
        num_samples: samples of the effective batch, over all ranks.
        num_micro_batches: micro-batches this rank ran for it.
        loss: weighted sum of the terms' means: what the gradient is the gradient of.
        losses: term of the loss to its mean over the effective batch.
        counts: term of the loss to the number of its items in the effective batch.
        gradient_norm: norm of the gradient before clipping; None if it was not computed.
        clipped: whether clipping made the gradient smaller; None if clipping is off.
        learning_rates: of each parameter group, as used by this step.
        skipped: whether the update was left out because the gradient was not finite.
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
    """The noise of the gradient, smoothed over the measured steps so far; comes just before the record of its step.

    Each mapping has "all parameters", then parameter groups or layers. The noise scale is an estimate of the critical
    batch size, not that size itself.

    Attributes:
        rank: the rank that reports this.
        step: number of the step, from 0 on.
        noise_scale: variance by squared norm, in samples; not to be believed outside of its interval.
        low: lower end of its 95% interval.
        high: upper end of it; infinite while only "at least the lower end" is known.
        squared_norm: squared norm of the gradient over all data.
        variance: variance of the gradient of one sample.
        items_per_sample: items of the loss (tokens, say) in a sample of this step.
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
    """The memory of a rank's device at the end of a step; comes just before the record of the step.

    Attributes:
        rank: the rank whose device it is.
        step: number of the step, from 0 on.
        allocated_bytes: in use by tensors; on a CPU by the whole process.
        reserved_bytes: taken by the caching allocator; None where there is none.
        peak_bytes: most in use by tensors at once since the step began; on a CPU, by the process since it began.
        limit_bytes: what there is, or what the run was allowed; None for no limit.
        category_bytes: weights, buffers, gradients, optimizer to their bytes: resident between steps, from their sizes.
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
    """Something the user should know about the run.

    Attributes:
        rank: the rank that found it.
        step: number of the step it was found in; None if it is not about one.
        code: its name in the documentation, the same in every run.
        level: how much it matters; an error will end the run.
        message: what was found, with numbers.
        remedy: what to do about it; None if nothing need be done.
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
    """An evaluation is over.

    Attributes:
        rank: the rank that reports this.
        step: steps made before it.
        num_samples: samples that were evaluated, over all ranks.
        metrics: name of a metric to its value over these samples.
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
        rank: the rank that reports this.
        event: fell_back means that this one could not be read and an older one is tried.
        step: steps made before it.
        path: where it is.
        num_bytes: its size on disk; None if that is not known.
        message: why it fell back; None otherwise.
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
    """A step ran out of memory on some rank, and every rank agreed on what to do. The step is repeated.

    Attributes:
        rank: the rank that reports this.
        step: number of the step, from 0 on; what earlier records say of its micro-batches was undone.
        phase: the phase it happened in; None if it happened on another rank only.
        micro_batch_size_before: most samples of a micro-batch until now.
        micro_batch_size_after: most samples of a micro-batch from now on; None if no smaller size can help.
        message: of the allocator; None if it happened on another rank only.
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
    """A run is over. A run whose last record is another one was killed.

    Attributes:
        rank: the rank that reports this.
        status: completed, stopped on request, or failed.
        num_steps: steps made since the very beginning, resumed ones included.
        message: why it stopped or failed; None if it completed.
        digest: digest of the final parameters; None if it was not computed.
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
"""Any record. More kinds and fields may come: an observer does nothing on a kind that it does not know."""


class Observer(Protocol):
    """Receives the records of a run. It may block, to pause a run or to step it by hand; it decides nothing."""

    def observe(self, record: Record, /) -> None:
        """Take one record. May be called from the thread of a backward hook. What it raises ends the run."""
        ...


class Observers:
    """Several observers as one: each record goes to all of them, in the order they are given."""

    __slots__ = ("_observers",)

    def __init__(self, *observers: Observer) -> None:
        """Keep the observers, in the order in which they are called."""
        self._observers = observers

    def observe(self, record: Record, /) -> None:
        """Hand the record to every observer; the first that raises ends that."""
        # An error is not caught: an observer that cannot write its log should end the run, not be forgotten.
        for observer in self._observers:
            observer.observe(record)
