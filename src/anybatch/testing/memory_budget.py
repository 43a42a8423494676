"""Run out of memory on purpose, on any machine: enforce a budget, or fail a chosen allocation.

`memory_budget` and `out_of_memory_at` count the results of torch operations, like `anybatch.memory.ledger`, but not
temporary memory inside kernels or allocations of other threads. They have no effect and no cost outside a `with` block.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from anybatch.memory.ledger import AllocationObserver, MemoryLedger
from anybatch.memory.torch_internals import tree_leaves
from anybatch.memory.trace import Phase

Holder = nn.Module | Optimizer | torch.Tensor
"""An object with existing memory: a module's parameters, buffers and gradients; an optimizer's state; a tensor."""

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def _ledger(on_allocation: AllocationObserver) -> MemoryLedger:
    """Return a ledger that also counts arguments of operations, which may have existed before the ledger."""

    def record_arguments(
        func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, phase: Phase
    ) -> None:
        del func, result, phase
        # The category does not matter, only the amount.
        ledger.categorize("inputs", _tensors_in((args, kwargs)))

    ledger = MemoryLedger(on_allocation=on_allocation, on_operation=record_arguments)
    return ledger


class MemoryBudget:
    """A limit on the memory of tensors, and the memory in use; created by `memory_budget`.

    Attributes:
        num_bytes: the budget. Change it during a run to simulate other programs on the device; this frees no tensors.
        peak_bytes: peak of allocated memory, without refused allocations.
        num_refused: number of refused allocations.
        ledger: records the memory of tensors.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.peak_bytes = 0
        self.num_refused = 0
        self.ledger = _ledger(self._watch)

    @property
    def held_bytes(self) -> int:
        """Current bytes of the tensors that the budget has seen."""
        return self.ledger.held_bytes

    def hold(self, *holders: Holder) -> None:
        """Register existing memory; a storage counts once, regardless of its views."""
        for holder in holders:
            self.ledger.categorize("weights", _tensors_of(holder))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _watch(self, held_bytes: int, num_bytes: int, operation: str) -> None:
        del operation
        # The tensor is already allocated; raising makes it unreachable, which frees it.
        if held_bytes <= self.num_bytes:
            self.peak_bytes = max(self.peak_bytes, held_bytes)
            return
        self.num_refused += 1
        before = held_bytes - num_bytes
        message = (
            f"Tried to allocate {_format_bytes(num_bytes)}. The memory budget has a total capacity of "
            f"{_format_bytes(self.num_bytes)} of which {_format_bytes(max(0, self.num_bytes - before))} is free. "
            f"{_format_bytes(before)} is held by tensors."
        )
        raise torch.OutOfMemoryError(message)


@contextmanager
def memory_budget(num_bytes: int, *holders: Holder) -> Iterator[MemoryBudget]:
    """Limit the memory of tensors: an operation that would exceed it raises `torch.OutOfMemoryError`.

    ```python
    with memory_budget(64 * 2**20, model, optimizer) as budget:
        engine.step(batch)
        budget.num_bytes //= 2  # another program needs memory
        engine.step(batch)
    ```

    As on a device, the operation raises in forward, backward or update, and the message has the sizes. Operations of
    this thread, of autograd for this thread, and of the engine's threads are counted.

    Args:
        num_bytes: the budget.
        holders: existing modules, optimizers and tensors. Other existing tensors count from their first use as an
            argument of an operation, which never raises.

    Yields:
        The budget; its `num_bytes` can be changed.
    """
    budget = MemoryBudget(num_bytes)
    budget.hold(*holders)
    ledger = budget.ledger
    try:
        with ledger:
            yield budget
    finally:
        ledger.forget()


class AllocationFault:
    """An allocation that fails on purpose; created by `out_of_memory_at`.

    Attributes:
        num_allocations: number of allocations so far, including failed ones; if a phase is given, only of this phase.
        failed: (operation, phase) of each allocation that failed.
        ledger: records the memory of tensors and the current phase.
    """

    def __init__(self, number: int, phase: Phase | None, times: int) -> None:
        self.num_allocations = 0
        self.failed: list[tuple[str, Phase]] = []
        self._number = number
        self._phase = phase
        self._times = times
        self._since_last = 0
        self.ledger = _ledger(self._watch)

    def _watch(self, held_bytes: int, num_bytes: int, operation: str) -> None:
        del held_bytes
        phase = self.ledger.current_phase
        if self._phase not in {None, phase}:
            return
        self.num_allocations += 1
        self._since_last += 1
        if self._since_last < self._number or len(self.failed) == self._times:
            return
        self._since_last = 0
        # Counting starts again at 0, so that `times=2` also fails in the retry.
        self.failed.append((operation, phase))
        self.ledger.phase = None  # a failed update would not reset the phase
        message = (
            f"Tried to allocate {_format_bytes(num_bytes)}. AllocationFault on purpose at allocation {self._number} of "
            f"{self._phase or 'any phase'}, in {operation}."
        )
        raise torch.OutOfMemoryError(message)

    def begin_update(self, *_: object) -> None:
        """Start the phase "update"."""
        self.ledger.phase = "update"

    def end_update(self, *_: object) -> None:
        """End the phase "update"."""
        self.ledger.phase = None


@contextmanager
def out_of_memory_at(number: int, *, phase: Phase | None = None, times: int = 1) -> Iterator[AllocationFault]:
    """Make one allocation of torch raise `torch.OutOfMemoryError`: the `number`-th in the `with` block, from 1.

    The same program fails at the same operation every time. With `number=0` no allocation fails; they are only counted.

    Args:
        number: number of the allocation that fails.
        phase: count only allocations in "backward" (by autograd), "update" (in an optimizer's step) or "forward" (all
            others); None: count all.
        times: number of failures; counting starts again after each, so that `times=2` also fails in the retry.

    Yields:
        The failed allocations and the number of allocations.
    """
    fault = AllocationFault(number, phase, times if number else 0)
    ledger = fault.ledger
    with ExitStack() as stack:
        # Registered first, so that it runs last, after the ledger has exited.
        stack.callback(ledger.forget)
        for handle in (
            register_optimizer_step_pre_hook(fault.begin_update),
            register_optimizer_step_post_hook(fault.end_update),
        ):
            stack.callback(handle.remove)
        stack.enter_context(ledger)
        yield fault


def _tensors_of(holder: Holder) -> list[torch.Tensor]:
    if isinstance(holder, torch.Tensor):
        # torch warns if `.grad` of a non-leaf tensor is read.
        gradient = holder.grad if holder.is_leaf else None
        return [holder] if gradient is None else [holder, gradient]
    if isinstance(holder, nn.Module):
        parameters = list(holder.parameters())
        return [*parameters, *holder.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    parameters = [parameter for group in holder.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*parameters, *gradients, *_tensors_in(list(holder.state.values()))]


def _tensors_in(nested: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


def _format_bytes(num_bytes: int) -> str:
    """Format a size like torch's allocator."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
