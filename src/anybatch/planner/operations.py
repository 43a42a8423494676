"""Costs of each operation of a step: floating-point operations, and bytes read and written.

Uses only shapes, so it works on fake tensors too.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from anybatch.core.torch_internals import storage_key
from anybatch.memory.trace import Phase
from anybatch.planner.step_time import CostTrace, DtypeName, Operation, OperationKind
from anybatch.planner.torch_internals import schema_of

_PRODUCTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "_grouped_mm": (0, 1),
}
"""The arguments that are multiplied."""
_CONVOLUTIONS = ("convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution")
_TRANSPOSED = 6
"""Position of this argument of `aten.convolution`; in its backward, arguments follow the output's gradient."""
_LOOK_UPS = ("embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward", "take")
"""Operations that read only as much of their first tensor as they write."""
_TAKE_MEMORY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations that allocate memory without writing to it."""
_DTYPE_NAMES: Mapping[torch.dtype, DtypeName] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class OperationRecorder:
    """Records the cost of every operation; an `OperationObserver` for the ledger.

    A forward after a backward starts the next micro-batch.
    """

    def __init__(self) -> None:
        self.cached_result: Callable[[], object | None] = lambda: None
        self._operations: list[Operation] = []
        self._known: dict[tuple[object, Phase, int], Operation] = {}
        self._micro_batch = 0
        self._after_backward = False

    def __call__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,  # noqa: ANN401 (any result)
        phase: Phase,
    ) -> None:
        """Record an operation."""
        # Queries of a device or layout, which only fake tensors dispatch.
        if func.namespace == "prim":
            return
        if phase == "backward":
            self._after_backward = True
        # Recomputed forwards run inside a backward, and do not start a micro-batch.
        elif phase == "forward" and self._after_backward:
            self._micro_batch += 1
            self._after_backward = False
        key = self.cached_result(), phase, self._micro_batch
        one = self._known.get(key)
        if one is None:
            one = operation_of(func, args, kwargs, result, phase=phase, micro_batch=self._micro_batch)
            # A key without a cached result does not identify the arguments.
            if key[0] is not None:
                self._known[key] = one
        self._operations.append(one)

    def trace(self) -> CostTrace:
        """Return the costs recorded so far."""
        return CostTrace(tuple(self._operations))


def operation_of(
    func: Any,  # noqa: ANN401 (torch's type has no name in public)
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,  # noqa: ANN401 (any result)
    *,
    phase: Phase,
    micro_batch: int = 0,
) -> Operation:
    """Return the cost of an operation, from its arguments and its result."""
    given = _tensors((args, kwargs))
    made = _tensors(result)
    changed = _changed(func, args, kwargs)
    name = func.overloadpacket.__name__
    kind = _kind(name)
    homes = {home for tensor in given if (home := _home(tensor)) is not None}
    # Results that share memory with an argument are views of it, and move no bytes.
    fresh = [tensor for tensor in made if _home(tensor) not in homes]
    if kind == "other" and (name in _TAKE_MEMORY or (not fresh and not changed)):
        kind = "view"
    # `out=` arguments are written, not read.
    overwritten = set(map(id, _tensors(kwargs.get("out"))))
    sources = [tensor for tensor in given if id(tensor) not in overwritten]
    read, written = _bytes_moved(name, sources, [*fresh, *changed])
    return Operation(
        name=name,
        kind=kind,
        phase=phase,
        micro_batch=micro_batch,
        dtype=_DTYPE_NAMES.get(given[0].dtype, "fp32") if given else "fp32",
        flops=_flops(func, kind, args, kwargs, result),
        bytes_read=0 if kind == "view" else read,
        bytes_written=0 if kind == "view" else written,
        num_tensors=_num_tensors(args) if kind == "foreach" else 1,
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


def _num_tensors(args: tuple[Any, ...]) -> int:
    """Return the number of tensors of a foreach operation: the length of its first list."""
    return max(1, len(args[0])) if args and isinstance(args[0], list | tuple) else 1


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors in arguments or results, including those in lists and mappings."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    if isinstance(values, Mapping):
        return [tensor for value in values.values() for tensor in _tensors(value)]
    return []


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


def _home(tensor: torch.Tensor) -> int | None:
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
        return None


def _bytes_moved(name: str, given: list[torch.Tensor], written_to: list[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes read and written; an expanded tensor counts with its actual memory."""
    written = sum(_num_bytes(tensor) for tensor in written_to)
    reads = [_num_bytes(tensor) for tensor in given]
    if name in _LOOK_UPS and reads:
        # A look-up reads the rows it returns, not the whole table.
        reads[0] = min(reads[0], written)
    return sum(reads), written


def _num_bytes(tensor: torch.Tensor) -> int:
    # An expanded axis has stride 0, and its elements are in memory only once.
    there = math.prod(length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return there * tensor.element_size()


def _flops(func: Any, kind: OperationKind, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:  # noqa: ANN401
    """Return floating-point operations; a multiplication and an addition count as two.

    Attention has two products, and five in its backward, which computes the scores again; causal attention counts half,
    since kernels skip masked products. Convolutions are counted by their weights, since torch's counter treats the
    weight gradient of a grouped convolution as dense, and so multiplies it by the number of groups. Other operations
    use torch's counter.
    """
    if kind in {"convolution", "convolution backward"}:
        return _convolution_flops(kind, args, result)
    if kind in {"attention", "attention backward"}:
        # The first argument of a backward is the gradient of the output.
        (query, key), num_products = (args[:2], 2) if kind == "attention" else (args[1:3], 5)
        # Some kernels take `is_causal` by position, others by name.
        is_causal = any(one is True for one in (*args, kwargs.get("is_causal")))
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
    """Return the operations of a convolution, or of its requested gradients, each of which costs the same.

    Each position of the output (or of the input, if transposed) is multiplied once by all weights of its groups.
    """
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
