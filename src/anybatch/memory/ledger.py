"""A ledger of tensor memory: every storage is booked when it is made and struck off when it is let go.

It sees what operations return, on any device and on fake tensors alike. It does not see what a kernel takes for itself
and gives back before it returns.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anybatch.core.memory_model import Allocation, Category, MemoryTrace, Phase

Watcher = Callable[[int, int, str], None]
"""Told (bytes held with the new allocation, bytes of it, operation) at each allocation; may raise."""

OperationWatcher = Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any, Phase], None]
"""Told (operation, arguments, keyword arguments, result, phase) after each operation."""

_NO_TASK = -1


class MemoryLedger(TorchDispatchMode):
    """Books tensor memory while it is entered.

    Memory that was there before is booked by `hold`, and while it is `paused` nothing else is. What is held after the
    block is struck off as it goes, too, so `held_bytes` stays true for as long as the ledger lives.

    Args:
        watcher: told each allocation once it is booked. An error it raises comes out of the operation.
        on_operation: told each operation.
        device_type: books tensors on devices of this type alone; None for all of them.
    """

    def __init__(
        self,
        *,
        watcher: Watcher | None = None,
        on_operation: OperationWatcher | None = None,
        device_type: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held_bytes = 0
        self.peak_bytes = 0
        self.phase: Phase | None = None
        self.paused = False
        self._watcher = watcher
        self._on_operation = on_operation
        self._device_type = device_type
        self._sizes: list[int] = []
        self._phases: list[Phase] = []
        self._operations: list[str] = []
        self._categories: dict[int, Category] = {}
        self._events: list[int] = []
        self._marks: list[tuple[int, str]] = []
        # The address of a storage is its name for as long as it lives: (number, what strikes it off).
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
    ) -> Any:  # noqa: ANN401 (whatever the operation returns)
        """Run an operation, and book what it returns."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, result, self.current_phase)
        if self.paused:
            return result
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._book(leaf, str(func))
        return result

    @property
    def current_phase(self) -> Phase:
        """Return what is going on: what was set, or else forward or backward, as autograd says."""
        if self.phase is not None:
            return self.phase
        return "forward" if torch._C._current_graph_task_id() == _NO_TASK else "backward"  # noqa: SLF001

    def hold(self, category: Category, tensors: Iterable[torch.Tensor]) -> None:
        """Book tensors as belonging to `category`, also those that were there before."""
        for tensor in tensors:
            number = self._book(tensor, "")
            if number is not None:
                self._categories[number] = category

    def mark(self, name: str) -> None:
        """Note that something happens between the last event and the next one."""
        self._marks.append((len(self._events), name))

    def trace(self) -> MemoryTrace:
        """Return everything booked so far."""
        rows = enumerate(zip(self._sizes, self._phases, self._operations, strict=True))
        return MemoryTrace(
            allocations=tuple(
                Allocation(num_bytes, self._category(number), phase, operation)
                for number, (num_bytes, phase, operation) in rows
            ),
            events=tuple(self._events),
            marks=tuple(self._marks),
        )

    def forget(self) -> None:
        """Stop following what is still held, so that letting it go is not booked any more."""
        self._live.clear()

    def _category(self, number: int) -> Category:
        """Return what was said of an allocation; what a forward makes is an activation, everything else temporary."""
        default: Category = "activations" if self._phases[number] == "forward" else "temporaries"
        return self._categories.get(number, default)

    def _book(self, tensor: torch.Tensor, operation: str) -> int | None:
        """Book the storage of a tensor, if that is new; return its number, None if it takes no memory."""
        if self._device_type is not None and tensor.device.type != self._device_type:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers without a storage of their own
            return None
        address, num_bytes = storage._cdata, storage.nbytes()  # noqa: SLF001 (torch has no other name for a storage)
        known = self._live.get(address)
        if known is not None:
            if self._sizes[known[0]] == num_bytes:
                return known[0]
            self._strike(address, known[0])  # it was resized
        if not num_bytes:
            return None
        number = len(self._sizes)
        self._sizes.append(num_bytes)
        self._phases.append(self.current_phase)
        self._operations.append(operation)
        self._events.append(number + 1)
        self._live[address] = number, weakref.ref(storage, lambda _: self._strike(address, number))
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self._watcher is not None and operation:
            self._watcher(self.held_bytes, num_bytes, operation)
        return number

    def _strike(self, address: int, number: int) -> None:
        """Strike a storage off, unless it has been already."""
        if self._live.get(address, (None,))[0] == number:
            del self._live[address]
            self._events.append(-(number + 1))
            self.held_bytes -= self._sizes[number]
