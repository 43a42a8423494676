"""Predict the time of a step from its operations.

An operation takes the time to launch it, plus the longer of its arithmetic and its memory traffic (a roofline):

    seconds = launch + max(flops / peak, bytes / bandwidth)

No device reaches its peaks, so each kind of operation has an efficiency: measured on this machine, or a rule of thumb
with a wide band around the prediction.

Source of the roofline: Williams, Waterman and Patterson 2009.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from anybatch.core.geometry import ceil_div
from anybatch.errors import PlanError
from anybatch.memory.trace import Phase
from anybatch.planner.devices import Arithmetic, Device

OperationKind = Literal[
    "view", "matmul", "convolution", "convolution backward", "attention", "attention backward", "foreach", "other"
]
"""Kind of work. A view touches no data; "other" moves bytes and computes little."""

DtypeName = Literal["fp32", "bf16", "fp16"]
"""Number formats of tensors in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step."""

    name: str  # name of the operation, such as `addmm`
    kind: OperationKind
    phase: Phase  # phase of the step in which it runs
    micro_batch: int = 0  # number of its micro-batch in the traced step; each backward ends one
    dtype: DtypeName = "fp32"  # number format of its first tensor
    flops: int = 0  # floating-point operations; 0 if not counted for this kind
    bytes_read: int = 0
    bytes_written: int = 0  # bytes of its results and of arguments changed in place
    num_tensors: int = 1  # number of tensors that a foreach operation processes; otherwise 1
    dims: tuple[int, ...] = ()  # (batch, rows, columns, inner) of a matrix product; empty for others

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed of a device.

    Attributes:
        name: name of the device.
        flops_per_second: peak, by number format.
        convolution_flops_per_second: peak of convolutions of fp32 tensors, which cuDNN computes in TF32 unless
            `torch.backends.cudnn.allow_tf32` is False; None for the "fp32" peak.
        bytes_per_second: memory bandwidth.
        launch_seconds: minimum time of any operation.
        host_seconds: host time per operation by phase: Python, autograd, the optimizer's loops.
        overlaps: the host runs ahead of the device, so that a step takes the maximum of both times, not the sum.
        efficiency: share of the roofline reached by each kind of operation; 1 for kinds that are missing.
        is_calibrated: whether the rates were measured.
        band: expected range of measured / predicted.
    """

    name: str
    flops_per_second: Mapping[DtypeName, float]
    bytes_per_second: float
    launch_seconds: float
    convolution_flops_per_second: float | None = None
    host_seconds: Mapping[Phase, float] = field(default_factory=dict)
    overlaps: bool = False
    efficiency: Mapping[OperationKind, float] = field(default_factory=dict)
    is_calibrated: bool = False
    band: tuple[float, float]

    def roofline_seconds(self, operation: Operation) -> float:
        """Return the time to launch an operation and run it at the device's peaks.

        Args:
            operation: the operation, with its floating-point operations and bytes.
        """
        peak = self.flops_per_second.get(operation.dtype, self.flops_per_second["fp32"])
        if operation.dtype == "fp32" and operation.kind in ("convolution", "convolution backward"):
            peak = self.convolution_flops_per_second or peak
        work = max(operation.flops / peak, operation.num_bytes / self.bytes_per_second)
        return self.launch_seconds * operation.num_tensors + work


UNMEASURED_EFFICIENCY: Mapping[OperationKind, float] = {
    "matmul": 0.65,
    "convolution": 0.45,
    "convolution backward": 0.4,
    "attention": 0.5,
    "attention backward": 0.4,
    "foreach": 0.8,
    "other": 0.75,
}
"""Shares of the roofline that vendors' kernels reach at sizes that fill a device. Rules of thumb."""
UNMEASURED_BAND = (0.6, 2.0)
"""For a device without measurements: from 40% faster than predicted to twice as long. A rule of thumb, too."""
CALIBRATED_BAND = (1 / 3, 3.0)
"""For a measured device and any model.

Of 19 randomly drawn models (benchmarks/plan_unseen.py --times --seed 21), the 18th largest error is a factor of 2.94,
so nine in ten further models have a smaller one (Vovk, Gammerman and Shafer 2005, conformal prediction).
"""
UNMEASURED_LAUNCH_SECONDS = 2e-6
UNMEASURED_HOST_SECONDS = 8e-6
"""Time per operation of Python, dispatcher and autograd on the host of an accelerator."""


def rates_of(device: Device, *, tf32: bool = False) -> Rates:
    """Return the rates of a device from its data sheet."""
    single: Arithmetic = "tf32" if tf32 else "fp32"
    return Rates(
        name=device.name,
        flops_per_second={"fp32": device.peak(single), "bf16": device.peak("bf16"), "fp16": device.peak("fp16")},
        convolution_flops_per_second=device.peak("tf32"),
        bytes_per_second=device.bytes_per_second,
        launch_seconds=UNMEASURED_LAUNCH_SECONDS,
        host_seconds=dict.fromkeys(("forward", "backward", "reduce", "clip", "update"), UNMEASURED_HOST_SECONDS),
        overlaps=True,
        efficiency=UNMEASURED_EFFICIENCY,
        band=UNMEASURED_BAND,
    )


def operation_seconds(operations: Iterable[Operation], rates: Rates) -> float:
    """Return the total time of operations, including host overhead."""
    device = host = 0.0
    for one in operations:
        host += rates.host_seconds.get(one.phase, 0.0) * one.num_tensors
        # A view launches no kernel, so on an accelerator it costs only the host.
        if one.kind != "view" or not rates.overlaps:
            device += rates.roofline_seconds(one) / rates.efficiency.get(one.kind, 1.0)
    # An accelerator computes while the host prepares the next operations; a CPU alternates between both.
    return max(device, host) if rates.overlaps else device + host


@dataclass(frozen=True, slots=True)
class CostTrace:
    """The operations of one traced step, in order."""

    operations: tuple[Operation, ...]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that had a backward."""
        return len({one.micro_batch for one in self.operations if one.phase == "backward"})

    def micro_batch(self, number: int) -> tuple[Operation, ...]:
        """Return the forward and backward of one micro-batch."""
        found = (one for one in self.operations if one.micro_batch == number)
        return tuple(one for one in found if one.phase in {"forward", "backward"})

    @property
    def per_step(self) -> tuple[Operation, ...]:
        """Operations that run once per step: reduction, clipping, update, and everything after the last backward."""
        last = self.num_micro_batches
        return tuple(
            one for one in self.operations if one.phase not in {"forward", "backward"} or one.micro_batch >= last
        )


@dataclass(frozen=True, slots=True)
class CostLine:
    """The operations of a step at any micro-batch size: all costs are affine in the size. Created by `fit_costs`."""

    traces: tuple[CostTrace, CostTrace]
    traced: tuple[int, int]

    def at(self, micro_batch_size: int) -> CostTrace:
        """Return the operations at a micro-batch size."""
        smaller, larger = self.traced
        part = (micro_batch_size - smaller) / (larger - smaller)
        pairs = zip(*(trace.operations for trace in self.traces), strict=True)
        return CostTrace(tuple(_interpolated(one, other, part) for one, other in pairs))


def fit_costs(trace_a: CostTrace, size_a: int, trace_b: CostTrace, size_b: int) -> CostLine:
    """Fit costs to two traces of the same program at different micro-batch sizes.

    Limits: the traffic of a loss over all pairs of samples is quadratic; trace at the size of interest instead.

    Raises:
        PlanError: the two traces have different operations.
    """
    # Not strict: the first different operation is a better message than different lengths, which are checked below.
    for number, (one, other) in enumerate(zip(trace_a.operations, trace_b.operations, strict=False)):
        if (one.name, one.phase, len(one.dims)) != (other.name, other.phase, len(other.dims)):
            message = (
                f"operation {number} is {one.name} in {one.phase} at micro-batch size {size_a}, but {other.name} in "
                f"{other.phase} at {size_b}, so times cannot be extrapolated. Try sizes on the device instead."
            )
            raise PlanError(message)
    lengths = len(trace_a.operations), len(trace_b.operations)
    if lengths[0] != lengths[1] or size_a == size_b:
        message = (
            f"costs need two micro-batch sizes with the same operations: {lengths[0]} operations at {size_a}, "
            f"{lengths[1]} at {size_b}. Try sizes on the device instead."
        )
        raise PlanError(message)
    return CostLine((trace_a, trace_b), (size_a, size_b))


def _interpolated(one: Operation, other: Operation, part: float) -> Operation:
    # Operations on parameters, and views, are the same at every size.
    if one is other or (one.num_bytes == other.num_bytes and one.dims == other.dims and one.flops == other.flops):
        return one

    def value(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * part))

    return replace(
        one,
        flops=value(one.flops, other.flops),
        bytes_read=value(one.bytes_read, other.bytes_read),
        bytes_written=value(one.bytes_written, other.bytes_written),
        dims=tuple(value(a, b) for a, b in zip(one.dims, other.dims, strict=True)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The all-reduce of gradients, once per step."""

    num_bytes: int  # bytes of all gradients
    world_size: int
    link_bytes_per_second: float  # bandwidth of the slowest link between two ranks, in one direction
    # The default of DistributedDataParallel.
    bucket_bytes: int = 25 << 20  # size of a bucket, which is reduced while backward continues

    @property
    def seconds(self) -> float:
        """Return the time of a ring all-reduce: each rank sends 2 (N - 1) / N of the bytes.

        Source: Patarasuk and Yuan 2009. Limits: bandwidth only; latency matters for gradients below a megabyte.
        """
        return 2 * (self.world_size - 1) / self.world_size * self.num_bytes / self.link_bytes_per_second

    def exposed_seconds(self, last_backward_seconds: float) -> float:
        """Return the seconds that the reduction adds to a step: the last backward hides all but the last bucket."""
        num_buckets = max(1, ceil_div(self.num_bytes, self.bucket_bytes))
        return max(self.seconds - last_backward_seconds, self.seconds / num_buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Time of a step on one rank."""

    micro_batches: float  # forward and backward of all micro-batches
    per_step: float  # clipping and update, which run once
    reduction: float  # the part of the reduction not hidden by the backward
    band: tuple[float, float]  # expected range of measured / predicted
    is_calibrated: bool  # whether the device was measured

    @property
    def total(self) -> float:
        """Total predicted seconds."""
        return self.micro_batches + self.per_step + self.reduction

    @property
    def least(self) -> float:
        """Lower end of the band."""
        return self.total * self.band[0]

    @property
    def greatest(self) -> float:
        """Upper end of the band."""
        return self.total * self.band[1]


def step_seconds(
    costs: CostLine, rates: Rates, sizes: Sequence[int], *, reduction: Reduction | None = None
) -> StepSeconds:
    """Return the time of a step on a rank that runs micro-batches of the given sizes.

    The first micro-batch creates the gradients, later ones add to them. If the first traced micro-batch computes more
    than later ones (a loss across samples runs all forwards first), every micro-batch counts as the mean of the traced
    ones.
    """
    seconds = {size: _micro_batch_seconds(costs.at(size), rates) for size in set(sizes)}
    all_of_them = sum(seconds[size][0 if number == 0 else 1] for number, size in enumerate(sizes))
    # Clipping and update do not depend on the micro-batch size.
    per_step = operation_seconds(costs.traces[0].per_step, rates)
    exposed = 0.0
    if reduction is not None and reduction.world_size > 1:
        last = costs.at(sizes[-1]) if sizes else costs.traces[0]
        # Only the last micro-batch reduces, so only its backward can hide the reduction.
        backward = [one for one in last.micro_batch(last.num_micro_batches - 1) if one.phase == "backward"]
        exposed = reduction.exposed_seconds(operation_seconds(backward, rates))
    return StepSeconds(
        micro_batches=all_of_them,
        per_step=per_step,
        reduction=exposed,
        band=rates.band,
        is_calibrated=rates.is_calibrated,
    )


def _micro_batch_seconds(trace: CostTrace, rates: Rates) -> tuple[float, float]:
    """Return the time of the first micro-batch and of each later one."""
    parts = [trace.micro_batch(number) for number in range(trace.num_micro_batches)]
    if not parts:
        return 0.0, 0.0
    first, later = (sum(one.flops for one in part) for part in (parts[0], parts[-1]))
    seconds = [operation_seconds(part, rates) for part in parts]
    # Accumulation makes later micro-batches slightly slower; a much slower first one ran all forwards.
    if first > 1.05 * later:
        mean = sum(seconds) / len(seconds)
        return mean, mean
    return seconds[0], seconds[-1]
