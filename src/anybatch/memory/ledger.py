"""A ledger of tensor memory: records every storage when it is allocated and when it is freed.

It records the storages of the results of operations, on any device and of fake tensors. It does not record workspaces,
which a kernel frees before it returns.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from anybatch.core.torch_internals import is_in_backward, storage_key
from anybatch.memory.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    is_overwritten,
    is_traceable_wrapper_subclass_type,
    is_view,
    tree_leaves,
)
from anybatch.memory.trace import Allocation, Category, MemoryTrace, Phase

AllocationObserver = Callable[[int, int, str], None]
"""Called at each allocation with (bytes in use after it, bytes of the allocation, operation); may raise an error."""

OperationObserver = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any, Phase], None]
"""Called with (operation, arguments, keyword arguments, result, phase) after each operation."""

PoolSelector = Callable[[], int]
"""Returns the number of the allocator's memory pool for the next allocation."""

DEVICE = torch.ops.prim.device.default
"""The operation that returns the device of a fake tensor."""

_aten = torch.ops.aten
_IN_PLACE: Mapping[Any, Any] = {
    getattr(_aten, name).default: getattr(_aten, f"{name}_").default
    for name in ("scatter_add", "index_add", "index_put")
} | {_aten.add.Tensor: _aten.add_.Tensor}
"""Operations that autograd runs out of place only under a mode, and their usual counterparts."""

_MEANS = frozenset({_aten.mean.default, _aten.mean.dim})
_SUMS = _MEANS | {_aten.sum.default, _aten.sum.dim_IntList}
"""Operations whose kernel begins with a copy of its argument if the result has another type."""

_SOFTMAX = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
_CONTIGUOUS = frozenset(
    getattr(_aten, name).default for name in ("col2im", "im2col", "nll_loss2d_forward", *_SOFTMAX, "gelu_backward")
)
"""Operations whose kernel copies arguments and results that are not contiguous; the last one on a CPU only."""
_HALVES = (torch.bfloat16, torch.float16)


def as_without_mode(func: Any, args: tuple[Any, ...]) -> Any:  # noqa: ANN401 (torch has no public name for this type)
    """Return the in-place operation that autograd would run without a mode; None if that is the same operation."""
    in_place = _IN_PLACE.get(func)
    if in_place is None or not is_in_backward() or not is_overwritten(args[0]):
        return None
    kinds = {(tensor.shape, tensor.dtype, tensor.layout) for tensor in args if isinstance(tensor, torch.Tensor)}
    return in_place if func is not _aten.add.Tensor or len(kinds) == 1 else None


def _distance_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of copies with two more columns, whose product is the squared distances."""
    return sum(each.nbytes // each.shape[-1] * (each.shape[-1] + 2) for each in tensors)


def _trilinear_bytes(*args: Any) -> int:  # noqa: ANN401 (three tensors, four lists and a number)
    """Return the bytes of both products in the kernel of `bilinear`, for one index of the axis that it loops over."""
    tensors, (*added, summed), looped = args[:3], args[3:7], args[7] if len(args) > 7 else 1  # noqa: PLR2004
    shapes = [list(each.shape) for each in tensors]
    for shape, axes in zip(shapes, added, strict=True):
        for axis in axes:
            shape.insert(axis, 1)
    sizes = [1 if axis == looped else max(found) for axis, found in enumerate(zip(*shapes, strict=True))]
    # The first product has no axis of the third factor alone, and is summed over axes that the third factor lacks.
    first, second, third = map(set, added)
    left_out = (first & second | third & set(summed), set(summed))
    kept = ([size for axis, size in enumerate(sizes) if axis not in axes] for axes in left_out)
    return sum(map(math.prod, kept)) * int(tensors[0].itemsize)


_PRODUCTS: Mapping[Any, Callable[..., int]] = {
    getattr(_aten, name).default: count
    for name, count in (("_trilinear", _trilinear_bytes), ("_euclidean_dist", _distance_bytes))
}
"""Operations whose kernels compute products, and the bytes of tensors in them."""


class MemoryLedger(TorchDispatchMode):
    """A context that records the memory of tensors.

    `categorize` also records tensors from before the context; while the ledger is `paused`, only `categorize` records
    allocations. Frees are also recorded after the context has ended, so `held_bytes` remains correct.
    """

    def __init__(
        self,
        *,
        on_allocation: AllocationObserver | None = None,
        on_operation: OperationObserver | None = None,
        device_type: str | None = None,
        pool: PoolSelector | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = 0
        self.peak_bytes = 0
        self.phase: Phase | None = None
        self.paused = False
        self.sums_without_cast = device_type == "cuda"
        self._is_in_micro_batch = self._is_after_backward = False
        self._on_allocation = on_allocation
        self._on_operation = on_operation
        self._device_type = device_type
        self._pool = pool
        self._allocations: list[Allocation] = []
        self._categorized: set[int] = set()  # numbers of the allocations with a category from `categorize`
        self._events: list[int] = []
        self._marks: list[tuple[int, str]] = []
        # Address of each live storage -> (number, weak reference whose callback records the free).
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 (torch's protocol)
        """Run an operation, and record its results."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut: this is two thirds of all calls on fake tensors, and slow in torch
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # torch then calls this again with the tensors inside the wrapper, such as a DTensor
        kwargs = kwargs or {}
        result = (as_without_mode(func, args) or func)(*args, **kwargs)
        self._record_operation(func, args, kwargs, result)
        return result

    @property
    def current_phase(self) -> Phase:
        """The phase that was set, or else "backward" if autograd runs a backward, and "forward" otherwise."""
        if self.phase is not None:
            return self.phase
        if not is_in_backward():
            return "forward"
        self._is_after_backward = self._is_in_micro_batch
        return "backward"

    def categorize(self, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """Assign a category to tensors, also to tensors from before the context; views of one storage count once."""
        if category == "inputs":  # the inputs of the next micro-batch
            self._is_after_backward = False
        for tensor in tensors:
            self._assign_category(self._record_tensor(tensor, ""), category)

    def record_resize(self, category: Category, storage: torch.UntypedStorage) -> None:
        """Record a new size of a storage. Call it after `resize_` of a storage, which is not a recorded operation."""
        self._assign_category(self._record_storage(storage, "resize_"), category)

    def mark(self, name: str) -> None:
        """Add a named mark, for reports and plots, between the last event and the next one."""
        self._marks.append((len(self._events), name))
        if name.startswith("micro-batch"):
            self._is_in_micro_batch, self._is_after_backward = not name.endswith("ends"), False

    def categorize_rest(self, category: Category) -> None:
        """Assign `category` to all live memory to which `categorize` has not assigned a category."""
        for number, _ in self._live.values():
            if number not in self._categorized:
                self._assign_category(number, category)

    @property
    def num_events(self) -> int:
        """Number of allocations and frees so far."""
        return len(self._events)

    def trace(self, start: int = 0, stop: int | None = None) -> MemoryTrace:
        """Return the trace from event `start` to `stop`; it begins with an allocation for each storage then in use."""
        before = set(self._events[:start])
        initial = sorted(event for event in before if event > 0 and -event not in before)
        part = self._events[start:stop]
        allocated = [event for event in part if event > 0]
        renumbered = {old: new for new, old in enumerate((*initial, *allocated), start=1)}
        events = [renumbered[event] if event > 0 else -renumbered[-event] for event in (*initial, *part)]
        # Caches are emptied in the order of pointers; sorted, equal steps have equal traces.
        groups = itertools.groupby(events, key=lambda event: event < 0)
        events = [event for is_free, group in groups for event in (sorted(group, reverse=True) if is_free else group)]
        marks = [(at - start + len(initial), name) for at, name in self._marks if 0 <= at - start <= len(part)]
        # Memory from before `start` was allocated outside of this part, so its phase and operation are dropped.
        older = (replace(self._allocations[number - 1], phase="setup", operation="") for number in initial)
        return MemoryTrace(
            allocations=(*older, *(self._allocations[number - 1] for number in allocated)),
            events=tuple(events),
            marks=tuple(marks),
        )

    def forget(self) -> None:
        """Stop recording the frees of live tensors."""
        self._live.clear()

    def _record_operation(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:  # noqa: ANN401
        """Report an operation that has run, and record its results."""
        # Also while the ledger is paused, because `on_operation` may estimate the time of operations.
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, result, self.current_phase)
        if self.paused:
            return
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not (is_view(func) and self._is_being_loaded(leaf)):
                self._record_tensor(leaf, str(func))
        copied = self._copied_bytes(func, args, result)
        if copied:
            self._events.append(-(self._record_allocation(copied, str(func)) + 1))
            if self._on_allocation is not None:
                self._on_allocation(self.held_bytes, copied, str(func))
            self.held_bytes -= copied

    def _copied_bytes(self, func: Any, args: tuple[Any, ...], result: Any) -> int:  # noqa: ANN401
        """Return the bytes of copies of arguments that an operation frees before it returns."""
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        dtypes, on_cpu = {tensor.dtype for tensor in tensors}, not self.sums_without_cast
        if func in _SUMS:
            # Kernels of CUDA add 16-bit values in float32 without a copy.
            dtype = torch.float32 if func in _MEANS and result.dtype in _HALVES else result.dtype
            is_cast = dtypes != {dtype} and (on_cpu or dtype is not torch.float32)
            return tensors[0].numel() * int(dtype.itemsize) * is_cast
        if func in _CONTIGUOUS and (on_cpu or func is not _aten.gelu_backward.default):
            return sum(each.nbytes for each in (*tensors, *tree_leaves(result)) if not each.is_contiguous())
        if func in _PRODUCTS:
            return _PRODUCTS[func](*args)
        if on_cpu and func is _aten.gather.default and result.dtype in _HALVES and not tensors[1].is_contiguous():
            return 2 * int(result.nbytes)  # in float32
        # Kernels of CUDA convert each element when they read it.
        if on_cpu and len(dtypes) > 1 and torch.Tag.pointwise in func.tags:
            dtype = torch.result_type(tensors[0], tensors[1])
            return sum(tensor.numel() * dtype.itemsize for tensor in tensors[:2] if tensor.dtype is not dtype)
        return 0

    def _is_being_loaded(self, view: torch.Tensor) -> bool:
        """Return whether a view in the phase "setup" is part of an unrecorded storage, such as a data set's."""
        if self.phase != "setup":
            return False
        storage = storage_or_none(view)
        return storage is not None and storage_key(storage) not in self._live and storage.nbytes() > view.nbytes

    def _assign_category(self, number: int | None, category: Category) -> None:
        if number is not None:
            self._allocations[number] = replace(self._allocations[number], category=category)
            self._categorized.add(number)

    def _record_tensor(self, tensor: torch.Tensor, operation: str) -> int | None:
        """Record the storage of a tensor if it is new; return its number, or None if it has no memory."""
        if self._device_type is not None and tensor.device.type != self._device_type:
            return None
        storage = storage_or_none(tensor)
        return None if storage is None else self._record_storage(storage, operation)

    def _record_storage(self, storage: torch.UntypedStorage, operation: str) -> int | None:
        """Record a storage if it is new; return its number, or None if it has no memory."""
        address, num_bytes = storage_key(storage), storage.nbytes()
        known = self._live.get(address)
        if known is not None:
            if self._allocations[known[0]].num_bytes == num_bytes:
                return known[0]
            self._record_free(address, known[0])  # resized
        if not num_bytes:
            return None
        number = self._record_allocation(num_bytes, operation)
        # The callback runs when the last tensor of the storage is garbage-collected, which is not an operation.
        self._live[address] = number, weakref.ref(storage, lambda _: self._record_free(address, number))
        if self._on_allocation is not None and operation:
            self._on_allocation(self.held_bytes, num_bytes, operation)
        return number

    def _record_allocation(self, num_bytes: int, operation: str) -> int:
        """Record an allocation; return its number."""
        number = len(self._allocations)
        phase = self.current_phase
        # A clone after the backward of the same micro-batch is the first gradient: see parallel/gradient_buckets.py.
        if phase == "forward" and self._is_after_backward and operation == "aten.clone.default":
            phase = "backward"
        category: Category = "activations" if phase == "forward" else "temporaries"
        pool = 0 if self._pool is None else self._pool()
        self._allocations.append(Allocation(num_bytes, category, phase, operation, pool))
        self._events.append(number + 1)
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return number

    def _record_free(self, address: int, number: int) -> None:
        """Record the free of a storage, unless it is already recorded."""
        # A newer storage may have got the address before this callback runs.
        if self._live.get(address, (None,))[0] == number:
            del self._live[address]
            self._events.append(-(number + 1))
            self.held_bytes -= self._allocations[number].num_bytes


def storage_or_none(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor; None for sparse tensors, and for wrappers without a storage."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
