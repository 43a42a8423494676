"""Running out of memory on purpose, on any machine: budgets that are enforced, and faults at a chosen allocation.

Both see memory as `anybatch.memory.ledger` does: what operations of torch return. What a kernel takes for itself is
seen by neither, nor is what threads of others allocate. Nothing is changed, and nothing costs, outside of the contexts.
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
"""Something that holds memory from before: parameters, buffers and gradients; an optimizer's state; a tensor."""

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


def _ledger(watcher: AllocationObserver) -> MemoryLedger:
    """Return a ledger that also records arguments of operations: a tensor seen first as one existed before."""

    def book_arguments(
        func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object, phase: Phase
    ) -> None:
        del func, result, phase
        # Under any category: here only the amount counts.
        ledger.hold("inputs", _tensors_in((args, kwargs)))

    ledger = MemoryLedger(watcher=watcher, on_operation=book_arguments)
    return ledger


class MemoryBudget:
    """A limit on the memory of tensors, and the memory in use; made by `memory_budget`.

    Attributes:
        num_bytes: the budget. Set it to lower or raise it in the middle of a run, as another tenant of a device would;
            tensors that exist already stay.
        peak_bytes: the most that was allocated at once, counting only allocations that were let through.
        num_refused: allocations that were not.
        ledger: records the memory of tensors.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.peak_bytes = 0
        self.num_refused = 0
        self.ledger = _ledger(self._watch)

    @property
    def held_bytes(self) -> int:
        """Bytes that tensors hold now, of those that the budget has seen."""
        return self.ledger.held_bytes

    def hold(self, *holders: Holder) -> None:
        """Book what was there before. A storage is booked once, however many tensors show it."""
        for holder in holders:
            self.ledger.hold("weights", _tensors_of(holder))
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _watch(self, held_bytes: int, num_bytes: int, operation: str) -> None:
        del operation
        # The allocation has been made by now: raising makes its tensor unreachable, and so frees it.
        if held_bytes <= self.num_bytes:
            self.peak_bytes = max(self.peak_bytes, held_bytes)
            return
        self.num_refused += 1
        before = held_bytes - num_bytes
        message = (
            f"Tried to allocate {_in_words(num_bytes)}. The memory budget has a total capacity of "
            f"{_in_words(self.num_bytes)} of which {_in_words(max(0, self.num_bytes - before))} is free. "
            f"{_in_words(before)} is held by tensors."
        )
        raise torch.OutOfMemoryError(message)


@contextmanager
def memory_budget(num_bytes: int, *holders: Holder) -> Iterator[MemoryBudget]:
    """Let tensors hold at most so many bytes at once: the operation that would pass it raises `torch.OutOfMemoryError`.

    ```python
    with memory_budget(64 * 2**20, model, optimizer) as budget:
        engine.step(batch)
        budget.num_bytes //= 2  # another tenant comes
        engine.step(batch)
    ```

    The error comes out of the operation, in forward, backward or update, with sizes in its message, as a device's
    allocator raises it. Only this thread's operations are seen, those that autograd runs for it, and those of the
    engine's own threads.

    Args:
        num_bytes: the budget.
        holders: modules, optimizers and tensors that hold memory already. What else was there before is booked when an
            operation first takes it as an argument; that alone never raises.

    Yields:
        The budget, to read and to change.
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
    """An allocation that fails on purpose; made by `out_of_memory_at`.

    Attributes:
        num_allocations: allocations of the phase, or of all, in the context so far, failed ones included.
        failed: (operation, phase) of each allocation that failed.
        ledger: books what tensors hold, and says which phase it is.
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
        # Counting starts again here, so that `times=2` fails once more in the retry.
        self.failed.append((operation, phase))
        self.ledger.phase = None  # the update does not come to its end
        message = (
            f"Tried to allocate {_in_words(num_bytes)}. AllocationFault on purpose at allocation {self._number} of "
            f"{self._phase or 'any phase'}, in {operation}."
        )
        raise torch.OutOfMemoryError(message)

    def begin_update(self, *_: object) -> None:
        """Count what follows as the phase "update"."""
        self.ledger.phase = "update"

    def end_update(self, *_: object) -> None:
        """Count what follows as forward or backward again."""
        self.ledger.phase = None


@contextmanager
def out_of_memory_at(number: int, *, phase: Phase | None = None, times: int = 1) -> Iterator[AllocationFault]:
    """Let one allocation of torch raise `torch.OutOfMemoryError`: the `number`-th in the context, from 1 on.

    The same program fails at the same place every time. Without a fault, `number=0`, allocations are only counted.

    Args:
        number: which allocation.
        phase: count only those in "forward" (whatever is neither of the others), "backward" (what autograd runs) or
            "update" (inside of an optimizer's step); None counts all.
        times: how many fail: after each fault counting starts again, so that `times=2` fails again in what comes next.

    Yields:
        What has failed and how many allocations there were.
    """
    fault = AllocationFault(number, phase, times if number else 0)
    ledger = fault.ledger
    with ExitStack() as stack:
        # Registered first, so that it runs last, after the ledger has been left.
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
        # torch warns if `.grad` of a tensor that is no leaf is read.
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


def _in_words(num_bytes: int) -> str:
    """Return a size as torch's allocator writes it."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
