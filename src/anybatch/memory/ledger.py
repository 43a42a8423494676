"""A ledger of tensor memory: records every storage when it is allocated and when it is freed.

It sees the results of operations, on any device and on fake tensors alike. It does not see workspaces, which a kernel
frees before it returns.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Self

import torch

from anybatch.core.torch_internals import is_in_backward, storage_key
from anybatch.memory.torch_internals import (
    FakeTensor,
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
    is_view,
    tree_leaves,
)
from anybatch.memory.trace import Allocation, Category, MemoryTrace, Phase

AllocationObserver = Callable[[int, int, str], None]
"""Called with (bytes in use, the new allocation included; bytes of it; operation) at each allocation; may raise."""

OperationObserver = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any, Phase], None]
"""Called with (operation, arguments, keyword arguments, result, phase) after each operation."""

PoolSelector = Callable[[], int]
"""Returns the number of the allocator's pool for the next allocation."""

DEVICE = torch.ops.prim.device.default
"""The operation that returns the device of a tensor without data."""


class MemoryLedger(TorchDispatchMode):
    """Records tensor memory while it is entered.

    `hold` also records older memory; while the ledger is `paused`, only `hold` records. Frees are recorded after the
    block, too, so `held_bytes` stays correct for as long as the ledger lives.
    """

    def __init__(
        self,
        *,
        watcher: AllocationObserver | None = None,
        on_operation: OperationObserver | None = None,
        device_type: str | None = None,
        pool: PoolSelector | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = 0
        self.peak_bytes = 0
        self.phase: Phase | None = None
        self.paused = False
        self._is_in_micro_batch = self._is_after_backward = False
        self._watcher = watcher
        self._on_operation = on_operation
        self._device_type = device_type
        self._pool = pool
        self._pools: list[int] = []
        self._sizes: list[int] = []
        self._phases: list[Phase] = []
        self._operations: list[str] = []
        self._categories: dict[int, Category] = {}
        self._events: list[int] = []
        self._marks: list[tuple[int, str]] = []
        # A storage is identified by its address for as long as it lives: (number, weak reference whose callback records
        # the free).
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 (torch's type has no name in public)
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the operation's result)
        """Run an operation, and record its results."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # two thirds of all calls on fake tensors, and the slowest path
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a wrapper tensor reports the size of the whole; its parts follow
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._see(func, args, kwargs, result)
        return result

    @property
    def current_phase(self) -> Phase:
        """The phase that was set, or else forward or backward, from autograd."""
        if self.phase is not None:
            return self.phase
        if not is_in_backward():
            return "forward"
        self._is_after_backward = self._is_in_micro_batch
        return "backward"

    def hold(self, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors as belonging to `category`, also older ones; several views of one storage count once."""
        if category == "inputs":  # of the next micro-batch
            self._is_after_backward = False
        for tensor in tensors:
            number = self._book(tensor, "")
            if number is not None:
                self._categories[number] = category

    def resized(self, category: Category, storage: torch.UntypedStorage) -> None:
        """Record that a storage was resized, which is not an operation and so not seen; call it afterwards."""
        number = self._book_storage(storage, "resize_")
        if number is not None:
            self._categories[number] = category

    def mark(self, name: str) -> None:
        """Set a named mark, for reports and plots, between the last event and the next one."""
        self._marks.append((len(self._events), name))
        if name.startswith("micro-batch"):
            self._is_in_micro_batch, self._is_after_backward = not name.endswith("ends"), False

    def hold_rest(self, category: Category) -> None:
        """Record all memory in use without a category as belonging to `category`."""
        for number, _ in self._live.values():
            self._categories.setdefault(number, category)

    @property
    def num_events(self) -> int:
        """Number of allocations and frees so far."""
        return len(self._events)

    def trace(self, start: int = 0, stop: int | None = None) -> MemoryTrace:
        """Return the recorded trace between two numbers of events; memory in use at `start` opens the trace."""
        # Memory in use at `start` opens the trace, so that its running sum is correct from there on.
        there = sorted(_live_after(self._events[:start]))
        rest = self._events[start:stop]
        taken = [event for event in rest if event > 0]
        renumbered = {old: new for new, old in enumerate((*there, *taken), start=1)}
        events = [renumbered[event] if event > 0 else -renumbered[-event] for event in (*there, *rest)]
        marks = [(place - start + len(there), name) for place, name in self._marks if 0 <= place - start <= len(rest)]
        return MemoryTrace(
            allocations=tuple(self._allocation(old - 1, before=new <= len(there)) for old, new in renumbered.items()),
            events=tuple(events),
            marks=tuple(marks),
        )

    def forget(self) -> None:
        """Stop tracking tensors that still exist, without recording their frees."""
        self._live.clear()

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:  # noqa: ANN401
        """Report an operation that has run, and record its results."""
        # Costs are counted while the ledger is paused, too: only memory of loading is left out.
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, result, self.current_phase)
        if self.paused:
            return
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not (_only_views(func) and self._is_being_loaded(leaf)):
                self._book(leaf, _name_of(func))

    def _is_being_loaded(self, view: torch.Tensor) -> bool:
        """Return whether a view, before any computation, is a part of older memory that was not held."""
        # A data set's memory is not part of a step, even if a sample is a view of it.
        if self.phase != "setup":
            return False
        try:
            storage = view.untyped_storage()
        except (NotImplementedError, RuntimeError):  # as in `_book`
            return False
        return storage_key(storage) not in self._live and storage.nbytes() > view.nbytes

    def _allocation(self, number: int, *, before: bool) -> Allocation:
        phase, operation = self._phases[number], self._operations[number]
        # The phase and operation of older memory belong to a part that was left out.
        if before:
            phase, operation = "setup", ""
        return Allocation(self._sizes[number], self._category(number), phase, operation, self._pools[number])

    def _category(self, number: int) -> Category:
        """Return the category of an allocation, by default activations in a forward and temporaries elsewhere."""
        default: Category = "activations" if self._phases[number] == "forward" else "temporaries"
        return self._categories.get(number, default)

    def _book(self, tensor: torch.Tensor, operation: str) -> int | None:
        """Record the storage of a tensor, if it is new; return its number, None if it takes no memory."""
        if self._device_type is not None and tensor.device.type != self._device_type:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors, and wrappers without a storage
            return None
        return self._book_storage(storage, operation)

    def _book_storage(self, storage: torch.UntypedStorage, operation: str) -> int | None:
        """Record a storage, if it is new; return its number, None if it takes no memory."""
        address, num_bytes = storage_key(storage), storage.nbytes()
        # A storage is recorded once for all tensors that view it.
        known = self._live.get(address)
        if known is not None:
            if self._sizes[known[0]] == num_bytes:
                return known[0]
            self._strike(address, known[0])  # resized
        if not num_bytes:
            return None
        number = self._take(num_bytes, operation)
        # The callback runs when the last tensor on the storage is gone, which no operation reports.
        self._live[address] = number, weakref.ref(storage, lambda _: self._strike(address, number))
        if self._watcher is not None and operation:
            self._watcher(self.held_bytes, num_bytes, operation)
        return number

    def _take(self, num_bytes: int, operation: str) -> int:
        """Record an allocation; return its number."""
        number = len(self._sizes)
        self._sizes.append(num_bytes)
        phase = self.current_phase
        # Copies after a backward, in its micro-batch, are first gradients: see parallel/gradient_buckets.py.
        is_copy = phase == "forward" and self._is_after_backward and operation == "aten.clone.default"
        self._phases.append("backward" if is_copy else phase)
        self._operations.append(operation)
        self._pools.append(0 if self._pool is None else self._pool())
        self._events.append(number + 1)
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return number

    def _record_free(self, number: int) -> None:
        """Record that an allocation is freed."""
        self._events.append(-(number + 1))
        self.held_bytes -= self._sizes[number]

    def _strike(self, address: int, number: int) -> None:
        """Record the free of a storage, unless it is recorded already."""
        # The address may have been reused by a newer storage before this callback runs.
        if self._live.get(address, (None,))[0] == number:
            del self._live[address]
            self._record_free(number)


@cache
def _only_views(func: Any) -> bool:  # noqa: ANN401 (torch's type has no name in public)
    return is_view(func)


@cache
def _name_of(func: Any) -> str:  # noqa: ANN401 (torch's type has no name in public)
    return str(func)


def _live_after(events: Iterable[int]) -> set[int]:
    """Return the numbers, from 1, of the allocations that are not yet freed after some events."""
    held: set[int] = set()
    for event in events:
        if event > 0:
            held.add(event)
        else:
            held.remove(-event)
    return held
