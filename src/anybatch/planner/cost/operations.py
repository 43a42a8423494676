"""Costs of each operation of a step: floating-point operations, and bytes read and written.

Works on tensors without data as well: only shapes are looked at.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from anybatch.core.torch_internals import storage_key
from anybatch.memory.trace import Phase
from anybatch.planner.cost.step_time import CostTrace, DtypeName, Operation, OperationKind
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
"""Which arguments are multiplied."""
_CONVOLUTIONS = ("convolution", "convolution_overrideable", "cudnn_convolution", "mkldnn_convolution")
_TRANSPOSED, _GROUPS = 6, 8
"""Places of these among the arguments of `aten.convolution`, and of its backward after the first."""
_LOOK_UPS = ("embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss2d_forward", "take")
"""These read as much of their first tensor as they write, not all of it."""
_TAKE_MEMORY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""These take memory and leave what is in it."""
_DTYPE_NAMES: Mapping[torch.dtype, DtypeName] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
"""Matrix products of attention: scores and output; in backward the scores again, and four gradients."""


class OperationRecorder:
    """Records the cost of every operation; an `OperationObserver` for the ledger.

    Micro-batches are told apart by their backward: what comes after one belongs to the next.

    Attributes:
        cached_result: returns an object that stands for the operation and all its arguments, the same one each time,
            so that its costs are worked out once; None where there is none.
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
        result: Any,  # noqa: ANN401 (whatever the operation returned)
        phase: Phase,
    ) -> None:
        """Record an operation."""
        # These ask for a device or a layout, and only tensors without data are asked.
        if func.namespace == "prim":
            return
        if phase == "backward":
            self._after_backward = True
        # A forward after a backward opens the next micro-batch; recomputation runs inside of a backward.
        elif phase == "forward" and self._after_backward:
            self._micro_batch += 1
            self._after_backward = False
        key = self.cached_result(), phase, self._micro_batch
        one = self._known.get(key)
        if one is None:
            one = operation_of(func, args, kwargs, result, phase=phase, micro_batch=self._micro_batch)
            # Without a cached result, equal keys do not mean equal arguments.
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
    result: Any,  # noqa: ANN401 (whatever the operation returned)
    *,
    phase: Phase,
    micro_batch: int = 0,
) -> Operation:
    """Return the cost of an operation, from its arguments and its result.

    Args:
        func: the operation, as a dispatch mode gets it.
        args: its arguments; tensors may be without data.
        kwargs: the same, by name.
        result: its result.
        phase: in which it ran.
        micro_batch: number of the micro-batch in the step, from 0.
    """
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
    # What an operation is given to write its result to is not read.
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
        dims=_dims(name, kind, args),
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
    """Return how many tensors a foreach operation works on: the length of its first list."""
    return max(1, len(args[0])) if args and isinstance(args[0], list | tuple) else 1


def _tensors(values: object) -> list[torch.Tensor]:
    """Return the tensors among arguments or results, which hold lists of them at most."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    if isinstance(values, Mapping):
        return [tensor for value in values.values() for tensor in _tensors(value)]
    return []


def _changed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return the arguments that the operation writes to, as its schema says."""
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
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers without a storage of their own
        return None


def _bytes_moved(name: str, given: list[torch.Tensor], written_to: list[torch.Tensor]) -> tuple[int, int]:
    """Return the bytes read and written; an expanded tensor counts as the memory it really has."""
    written = sum(_num_bytes(tensor) for tensor in written_to)
    reads = [_num_bytes(tensor) for tensor in given]
    if name in _LOOK_UPS and reads:
        # A look-up reads the rows it returns, not the whole table.
        reads[0] = min(reads[0], written)
    return sum(reads), written


def _num_bytes(tensor: torch.Tensor) -> int:
    # An expanded axis has stride 0: its elements are in memory once.
    there = math.prod(length for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return there * tensor.element_size()


def _flops(func: Any, kind: OperationKind, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> int:  # noqa: ANN401
    """Return floating-point operations, a multiplication and an addition counting as two.

    Of attention under a causal mask half: kernels skip what is masked. Convolutions by their weights: torch's counter
    takes the gradient of weights in groups for that of dense ones, which is as many times too many as there are groups.
    Others as torch's own counter has them.
    """
    if kind in {"convolution", "convolution backward"}:
        return _convolution_flops(kind, args, result)
    if kind in {"attention", "attention backward"}:
        batch, queries, keys, width = _attention_dims(kind, args)
        num_products = _FORWARD_PRODUCTS if kind == "attention" else _BACKWARD_PRODUCTS
        # Kernels take it at different places, by position or by name.
        is_causal = any(one is True for one in (*args, kwargs.get("is_causal")))
        return 2 * num_products * batch * queries * keys * width // (2 if is_causal else 1)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if func.overloadpacket.__name__ in {"mv", "addmv"}:
        return 2 * math.prod(_dims(func.overloadpacket.__name__, kind, args))
    if func.overloadpacket.__name__ == "_grouped_mm":
        # Each row meets the matrix of its own group, so that groups do not multiply the work.
        rows, inner = args[0].shape[-2:]
        return int(2 * rows * inner * args[1].shape[-1])
    return 0


def _convolution_flops(kind: OperationKind, args: tuple[Any, ...], result: object) -> int:
    """Return the operations of a convolution, or of the gradients that are asked for: each takes as many.

    Each position of the output, of the input where it is transposed, meets all weights of its groups once.
    """
    is_backward = kind == "convolution backward"
    output = args[0] if is_backward else result
    image, weight = args[is_backward], args[is_backward + 1]
    # The kernels of libraries know no transposed ones.
    positions = image if args[is_backward:][_TRANSPOSED] is True else output
    assert isinstance(positions, torch.Tensor), "a convolution returns a tensor"
    num_products = sum(args[-1][:2]) if is_backward else 1
    return int(2 * num_products * positions.shape[0] * math.prod(positions.shape[2:]) * math.prod(weight.shape))


def _dims(name: str, kind: OperationKind, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the lengths that decide how well the arithmetic units are used."""
    if kind == "matmul":
        left, right = (args[at].shape for at in _PRODUCTS[name])
        batch = math.prod(left[:-2])
        return batch, left[-2], right[-1] if len(right) > 1 else 1, left[-1]
    if kind == "convolution":
        return _convolution_dims(args)
    if kind == "convolution backward":
        # A backward takes the gradient of the output first.
        return _convolution_dims(args[1:])
    return _attention_dims(kind, args) if kind in {"attention", "attention backward"} else ()


def _convolution_dims(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Return (images, channels in of a group, channels out, kernel, positions, groups)."""
    image, weight = args[0].shape, args[1].shape
    # Groups count, since one channel in each of many takes other kernels than an image of one channel.
    num_groups = args[_GROUPS] if len(args) > _GROUPS else max(1, image[1] // weight[1])
    return image[0], weight[1], weight[0], math.prod(weight[2:]), math.prod(image[2:]), num_groups


def _attention_dims(kind: OperationKind, args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Return (batch and heads, queries, keys, width of a head)."""
    # A backward takes the gradient of the output before these.
    query, key = args[:2] if kind == "attention" else args[1:3]
    return math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
