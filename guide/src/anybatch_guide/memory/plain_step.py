"""A step of plain PyTorch without accumulation: its memory, and torch's error if a memory budget is too small."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace, Phase, timeline
from anybatch.testing import memory_budget
from anybatch_guide.memory.small import Batch, SmallModel, isolated_random_state


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutOfMemory:
    """A step that ran out of memory."""

    message: str  # message of the error
    phase: Phase  # forward, backward or update
    category_bytes: Mapping[str, int]  # bytes of tensors by category when the allocation failed


def trace_plain_step(small_model: SmallModel, num_samples: int) -> MemoryTrace:
    """Return all allocations and frees of tensors in the second step, for a batch of the given size."""
    run = _MeasuredRun(small_model, num_samples)
    run.step()
    return run.trace()


def try_plain_step(small_model: SmallModel, num_samples: int, budget_bytes: int) -> OutOfMemory | None:
    """Run a step within a memory budget; return its out-of-memory error, or None if it fits."""
    run = _MeasuredRun(small_model, num_samples)
    try:
        run.step(budget_bytes)
    except torch.OutOfMemoryError as error:
        measured = timeline(run.trace())
        last = len(measured.totals) - 1
        return OutOfMemory(message=str(error), phase=run.phase, category_bytes=measured.at(last))
    return None


class _MeasuredRun:
    """A model, AdamW with its state, a batch, and the ledger that records their memory."""

    def __init__(self, small_model: SmallModel, num_samples: int) -> None:
        self.phase: Phase = "forward"
        self._small_model = small_model
        self._ledger = MemoryLedger()
        with isolated_random_state():
            self._model = small_model.make()
        self._optimizer: Optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._pass(small_model.batch(2))  # creates the optimizer state; BatchNorm needs two samples for a variance
        self._batch = small_model.batch(num_samples)

    def step(self, budget_bytes: int | None = None) -> None:
        """Make one step: zero, forward, backward, update."""
        ledger, model = self._ledger, self._model
        ledger.phase = "setup"
        ledger.categorize("weights", model.parameters())
        ledger.categorize("buffers", model.buffers())
        ledger.categorize("optimizer", _state_of(self._optimizer))
        ledger.categorize("inputs", self._batch.values())
        ledger.phase = None
        with ExitStack() as stack:
            if budget_bytes is not None:
                stack.enter_context(memory_budget(budget_bytes, model, self._optimizer, *self._batch.values()))
            stack.enter_context(ledger)
            try:
                self._pass(self._batch)
            finally:
                # Also after an error, because the report of the error lists the gradients so far.
                ledger.categorize("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        self._optimizer.zero_grad()

    def trace(self) -> MemoryTrace:
        """Return the recorded allocations and frees, and stop recording."""
        trace = self._ledger.trace()
        self._ledger.forget()
        return trace

    def _pass(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        self.phase = "forward"
        loss = self._small_model.loss(self._model, batch)
        self.phase = "backward"
        loss.backward()
        self.phase = self._ledger.phase = "update"
        self._optimizer.step()
        self._ledger.phase = None


def _state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    states = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in states if isinstance(value, torch.Tensor)]
