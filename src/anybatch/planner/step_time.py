"""Predict the time of a step from its operations: their floating-point operations, and bytes read and written.

An operation takes the time to launch it, plus the longer of its arithmetic and its memory traffic (a roofline):

    seconds = launch + max(flops / peak, bytes / bandwidth)

No device reaches its peaks, so each kind of operation has an efficiency: a rule of thumb, with a wide band around the
prediction. Five of six models were inside this band on an H200 (benchmarks/results/gpu_step_times_h200_2026-11-26.md).

Source of the roofline: Williams, Waterman and Patterson 2009.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.flop_counter import flop_registry

from anybatch.core.geometry import ceil_div
from anybatch.core.torch_internals import storage_key
from anybatch.errors import PlanError
from anybatch.memory.ledger import storage_or_none
from anybatch.memory.torch_internals import tree_leaves
from anybatch.memory.trace import Phase
from anybatch.planner.devices import Device
from anybatch.planner.torch_internals import schema_of

OperationKind = Literal[
    "view", "matmul", "convolution", "convolution backward", "attention", "attention backward", "foreach", "other"
]
"""Kind of work. A view moves no data; "other" moves bytes and computes little."""

DtypeName = Literal["fp32", "tf32", "bf16", "fp16"]
"""Number formats of an operation; "tf32" for products of float32 tensors in TF32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step."""

    name: str  # name of the operation, such as `addmm`
    kind: OperationKind
    phase: Phase  # phase of the step in which it runs
    micro_batch: int = 0  # number of the micro-batch in the traced step; each backward ends a micro-batch
    dtype: DtypeName = "fp32"  # number format of the first tensor among the arguments
    flops: int = 0  # floating-point operations; 0 if not counted for this kind
    num_bytes: int = 0  # bytes of its arguments, of its results, and again of arguments changed in place
    num_tensors: int = 1  # number of tensors that a foreach operation processes; otherwise 1
    dims: tuple[int, ...] = ()  # (batch, rows, columns, inner) of a matrix product; empty for other operations


EFFICIENCY: Mapping[OperationKind, float] = {
    "view": 1.0,
    "matmul": 0.65,
    "convolution": 0.45,
    "convolution backward": 0.4,
    "attention": 0.5,
    "attention backward": 0.4,
    "foreach": 0.8,
    "other": 0.75,
}
"""Fraction of the roofline that vendors' kernels reach at sizes that fill a device. Rules of thumb."""
BAND = (0.6, 2.0)
"""Expected range of measured / predicted time, also a rule of thumb: from 0.6 times to twice the prediction."""
LAUNCH_SECONDS = 2e-6
HOST_SECONDS = 8e-6
"""Time per operation of Python, dispatcher and autograd on the host."""
BUCKET_BYTES = 25 << 20
"""Size of a bucket of gradients, which is reduced during the backward; DistributedDataParallel's default."""


def operation_seconds(operations: Iterable[Operation], device: Device) -> float:
    """Return the seconds of operations on an accelerator, which computes while the host launches later operations."""
    busy = host = 0.0
    for operation in operations:
        if operation.phase != "setup":
            host += HOST_SECONDS * operation.num_tensors
        if operation.kind != "view":  # a view launches no kernel
            busy += roofline_seconds(operation, device) / EFFICIENCY[operation.kind]
    return max(busy, host)


def roofline_seconds(operation: Operation, device: Device) -> float:
    """Return the seconds to launch an operation and run it at the device's peak rates."""
    # cuDNN computes convolutions of fp32 tensors in TF32 unless `torch.backends.cudnn.allow_tf32` is False.
    is_convolution = operation.kind in ("convolution", "convolution backward")
    peak = device.peak("tf32" if operation.dtype == "fp32" and is_convolution else operation.dtype)
    work = max(operation.flops / peak, operation.num_bytes / device.bytes_per_second)
    return LAUNCH_SECONDS * operation.num_tensors + work


@dataclass(frozen=True, slots=True)
class CostTrace:
    """The operations of one traced step, in order."""

    operations: tuple[Operation, ...]

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches that had a backward."""
        return len({operation.micro_batch for operation in self.operations if operation.phase == "backward"})

    def micro_batch(self, number: int) -> tuple[Operation, ...]:
        """Return the forward and backward of one micro-batch."""
        found = (operation for operation in self.operations if operation.micro_batch == number)
        return tuple(operation for operation in found if operation.phase in {"forward", "backward"})

    @property
    def per_step(self) -> tuple[Operation, ...]:
        """Operations that run once per step: reduction, clipping, update, and everything after the last backward."""
        last = self.num_micro_batches
        return tuple(op for op in self.operations if op.phase not in {"forward", "backward"} or op.micro_batch >= last)


@dataclass(frozen=True, slots=True)
class CostLine:
    """The operations of a step at any micro-batch size; costs are linear functions of the size. See `fit_costs`."""

    traces: tuple[CostTrace, CostTrace]
    traced: tuple[int, int]

    def at(self, micro_batch_size: int) -> CostTrace:
        """Return the operations at a micro-batch size."""
        smaller, larger = self.traced
        part = (micro_batch_size - smaller) / (larger - smaller)
        pairs = zip(*(trace.operations for trace in self.traces), strict=True)
        return CostTrace(tuple(_interpolated(low, high, part) for low, high in pairs))

    def mapped(self, change: Callable[[Operation], Operation]) -> "CostLine":
        """Return the costs with changed operations."""
        low, high = (CostTrace(tuple(map(change, trace.operations))) for trace in self.traces)
        return CostLine((low, high), self.traced)


def fit_costs(trace_a: CostTrace, size_a: int, trace_b: CostTrace, size_b: int) -> CostLine:
    """Return the line through two traces of the same program at different micro-batch sizes.

    Limits: the traffic of a loss over all pairs of samples is quadratic; for such a loss, trace the size itself.
    """
    for number, pair in enumerate(itertools.zip_longest(trace_a.operations, trace_b.operations)):
        one, other = ("missing" if each is None else f"{each.name} in {each.phase}" for each in pair)
        if one != other:
            message = (
                f"operation {number} is {one} at micro-batch size {size_a}, but {other} at {size_b}, so times cannot "
                "be extrapolated. Try sizes on the device instead."
            )
            raise PlanError(message)
    return CostLine((trace_a, trace_b), (size_a, size_b))


def _interpolated(low: Operation, high: Operation, part: float) -> Operation:
    # Operations on parameters, and views, are the same at every size.
    if low is high or (low.num_bytes == high.num_bytes and low.dims == high.dims and low.flops == high.flops):
        return low

    def value(a: int, b: int) -> int:
        return max(0, round(a + (b - a) * part))

    return replace(
        low,
        flops=value(low.flops, high.flops),
        num_bytes=value(low.num_bytes, high.num_bytes),
        dims=tuple(value(a, b) for a, b in zip(low.dims, high.dims, strict=True)),
    )


def exposed_seconds(
    gradient_bytes: int, world_size: int, link_bytes_per_second: float, backward_seconds: float
) -> float:
    """Return the seconds that the all-reduce of gradients adds to a step; a backward can hide all but the last bucket.

    Around a ring each rank sends 2 (N - 1) / N of the bytes.

    Source: Patarasuk and Yuan 2009. Limits: bandwidth only; latency matters for gradients below a megabyte.
    """
    seconds = 2 * (world_size - 1) / world_size * gradient_bytes / link_bytes_per_second
    num_buckets = max(1, ceil_div(gradient_bytes, BUCKET_BYTES))
    return max(seconds - backward_seconds, seconds / num_buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Time of a step on one rank."""

    micro_batches: float  # forward and backward of all micro-batches
    per_step: float  # clipping and update, which run once
    reduction: float  # the part of the reduction not hidden by the backward

    @property
    def total(self) -> float:
        """Total predicted seconds."""
        return self.micro_batches + self.per_step + self.reduction

    @property
    def least(self) -> float:
        """Lower end of the band."""
        return self.total * BAND[0]

    @property
    def greatest(self) -> float:
        """Upper end of the band."""
        return self.total * BAND[1]


def step_seconds(
    costs: CostLine, device: Device, sizes: Sequence[int], *, world_size: int = 1, gradient_bytes: int = 0
) -> StepSeconds:
    """Return the time of a step on a rank that runs micro-batches of the given sizes.

    The first micro-batch creates the gradients, later ones add to them. An `ab.joint` loss runs all forwards first,
    so the first traced micro-batch computes more than later ones; for such a loss, all have the mean of both times.
    """
    seconds = {size: _micro_batch_seconds(costs.at(size), device) for size in set(sizes)}
    exposed = 0.0
    if world_size > 1:
        # Only the last micro-batch reduces, so only its backward can hide the reduction.
        last = costs.at(sizes[-1])
        backward = [op for op in last.micro_batch(last.num_micro_batches - 1) if op.phase == "backward"]
        hiding = operation_seconds(backward, device)
        exposed = exposed_seconds(gradient_bytes, world_size, device.link_bytes_per_second, hiding)
    return StepSeconds(
        micro_batches=sum(seconds[size][0 if number == 0 else 1] for number, size in enumerate(sizes)),
        # Clipping and update do not depend on the micro-batch size.
        per_step=operation_seconds(costs.traces[0].per_step, device),
        reduction=exposed,
    )


def _micro_batch_seconds(trace: CostTrace, device: Device) -> tuple[float, float]:
    """Return the time of the first micro-batch and of each later one."""
    parts = [trace.micro_batch(number) for number in range(trace.num_micro_batches)]
    first, later = (sum(operation.flops for operation in part) for part in (parts[0], parts[-1]))
    seconds = [operation_seconds(part, device) for part in parts]
    # A first micro-batch with more operations ran all forwards.
    if first > 1.05 * later:
        mean = sum(seconds) / len(seconds)
        return mean, mean
    return seconds[0], seconds[-1]


_PRODUCTS = dict.fromkeys(("mm", "bmm", "mv", "_grouped_mm"), (0, 1)) | dict.fromkeys(
    ("addmm", "baddbmm", "addmv"), (1, 2)
)
"""Operation -> positions of the two arguments that are multiplied."""
_CONVOLUTIONS = ("convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution")
_TRANSPOSED = 6
"""Position of `transposed` in the arguments of `aten.convolution`; in its backward, the gradient precedes these."""
_LOOK_UPS = ("embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward", "take")
"""Operations that read only as much of their first tensor as they write."""
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that allocate memory without writing to it."""
_DTYPE_NAMES: Mapping[torch.dtype, DtypeName] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class OperationRecorder:
    """Records the cost of every operation that the ledger reports to it (an `OperationObserver`).

    A forward after a backward starts the next micro-batch.
    """

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._micro_batch = 0
        self._after_backward = False

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, phase: Phase) -> None:  # noqa: ANN401
        """Record an operation."""
        # Skip queries of a device or layout, which only fake tensors dispatch.
        if func.namespace == "prim":
            return
        if phase == "backward":
            self._after_backward = True
        # Recomputed forwards run inside a backward, and do not start a micro-batch.
        elif phase == "forward" and self._after_backward:
            self._micro_batch += 1
            self._after_backward = False
        self._operations.append(operation_of(func, args, kwargs, result, phase=phase, micro_batch=self._micro_batch))

    def trace(self) -> CostTrace:
        """Return the costs recorded so far."""
        return CostTrace(tuple(self._operations))


def operation_of(
    func: Any,  # noqa: ANN401 (torch has no public name for this type)
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,  # noqa: ANN401 (any result)
    *,
    phase: Phase,
    micro_batch: int = 0,
) -> Operation:
    """Return the cost of an operation, from its arguments and its result."""
    inputs = _tensors((args, kwargs))
    results = _tensors(result)
    changed = _changed(func, args, kwargs)
    name = func.overloadpacket.__name__
    kind = _kind(name)
    homes = {storage_key(home) for tensor in inputs if (home := storage_or_none(tensor)) is not None}
    # Results that share memory with an argument are views of it, and move no bytes.
    fresh = [value for value in results if (home := storage_or_none(value)) is None or storage_key(home) not in homes]
    if kind == "other" and (name in _ALLOCATIONS or (not fresh and not changed)):
        kind = "view"
    # `out=` arguments are written, not read.
    overwritten = set(map(id, _tensors(kwargs.get("out"))))
    sources = [tensor for tensor in inputs if id(tensor) not in overwritten]
    return Operation(
        name=name,
        kind=kind,
        phase=phase,
        micro_batch=micro_batch,
        dtype=_DTYPE_NAMES.get(inputs[0].dtype, "fp32") if inputs else "fp32",
        flops=_flops(func, kind, args, kwargs, result),
        num_bytes=0 if kind == "view" else _bytes_moved(name, sources, [*fresh, *changed]),
        # A foreach operation begins with a list of tensors.
        num_tensors=max(1, len(args[0])) if kind == "foreach" and isinstance(args[0], list | tuple) else 1,
        dims=_product_dims(name, args) if kind == "matmul" else (),
    )


def _kind(name: str) -> OperationKind:
    if name in _PRODUCTS:
        return "matmul"
    if name in _CONVOLUTIONS:
        return "convolution"
    if name == "convolution_backward":
        return "convolution backward"
    if "scaled_dot_product" in name or name.startswith(("_flash_attention", "_efficient_attention")):
        return "attention backward" if "backward" in name else "attention"
    return "foreach" if name.startswith(("_foreach", "_fused", "_amp_foreach")) else "other"


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the arguments that the operation writes to, according to its schema."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    values: list[object] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(kwargs.get(argument.name, args[number] if number < len(args) else None))
    return _tensors(values)


def _bytes_moved(name: str, sources: list[torch.Tensor], written_to: list[torch.Tensor]) -> int:
    """Return the bytes read and written; of an expanded tensor, count only the bytes that it has in memory."""
    written = sum(map(_num_bytes, written_to))
    reads = [_num_bytes(tensor) for tensor in sources]
    if name in _LOOK_UPS and reads:
        # A look-up reads the rows it returns, not the whole table.
        reads[0] = min(reads[0], written)
    return sum(reads) + written


def _num_bytes(tensor: torch.Tensor) -> int:
    # An expanded axis has stride 0, and its elements are in memory only once.
    num_elements = math.prod(length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return num_elements * tensor.element_size()


def _flops(func: Any, kind: OperationKind, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:  # noqa: ANN401
    """Return floating-point operations, by torch's counter where possible; a multiply-add counts as two.

    Attention has two products, its backward five (it computes the scores again), and causal attention half of them.
    Torch's counter multiplies the weight gradient of a grouped convolution by the number of groups; ours does not.
    """
    if kind in {"convolution", "convolution backward"}:
        return _convolution_flops(kind, args, result)
    if kind in {"attention", "attention backward"}:
        # The first argument of a backward is the gradient of the output.
        (query, key), num_products = (args[:2], 2) if kind == "attention" else (args[1:3], 5)
        # Some kernels take `is_causal` by position, others by name.
        is_causal = any(argument is True for argument in (*args, kwargs.get("is_causal")))
        return int(2 * num_products * query.numel() * key.shape[-2] // (2 if is_causal else 1))
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.overloadpacket.__name__ in {"mv", "addmv"}:
        return 2 * math.prod(_product_dims(func.overloadpacket.__name__, args))
    if func.overloadpacket.__name__ == "_grouped_mm":
        # Each row is multiplied by the matrix of its group only, so the number of groups does not matter.
        rows, inner = args[0].shape[-2:]
        return int(2 * rows * inner * args[1].shape[-1])
    return 0


def _convolution_flops(kind: OperationKind, args: tuple[Any, ...], result: object) -> int:
    """Return the operations of a convolution, or of each gradient: all weights of a group at each output position."""
    is_backward = kind == "convolution backward"
    output = args[0] if is_backward else result
    image, weight = args[is_backward], args[is_backward + 1]
    # Library kernels have no argument for transposed convolutions.
    positions = image if args[is_backward:][_TRANSPOSED] is True else output
    assert isinstance(positions, torch.Tensor), "a convolution returns a tensor"
    num_products = sum(args[-1][:2]) if is_backward else 1
    return int(2 * num_products * positions.shape[0] * math.prod(positions.shape[2:]) * math.prod(weight.shape))


def _product_dims(name: str, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return (batch, rows, columns, inner) of a matrix product."""
    left, right = (args[at].shape for at in _PRODUCTS[name])
    return math.prod(left[:-2]), left[-2], right[-1] if len(right) > 1 else 1, left[-1]
