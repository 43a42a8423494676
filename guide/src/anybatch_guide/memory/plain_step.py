"""A step of plain PyTorch without accumulation: its memory, and torch's error if it exceeds a budget."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.trace import MemoryTrace, Phase, timeline
from anybatch.testing import memory_budget
from anybatch_guide.memory.small import Batch, SmallModel, own_random_numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutOfMemory:
    """A step that ran out of memory."""

    message: str  # message of the error
    phase: Phase  # forward, backward or update
    held: Mapping[str, int]  # bytes of tensors by category at that moment, without the failed allocation


def trace_plain_step(what: SmallModel, num_samples: int) -> MemoryTrace:
    """Return all allocations and frees of tensors in the second step, for a batch of the given size."""
    run = _Run(what, num_samples)
    run.step()
    return run.trace()


def try_plain_step(what: SmallModel, num_samples: int, budget_bytes: int) -> OutOfMemory | None:
    """Run the same step with a limit in bytes; return its failure, or None."""
    run = _Run(what, num_samples)
    try:
        run.step(budget_bytes)
    except torch.OutOfMemoryError as error:
        measured = timeline(run.trace())
        last = len(measured.totals) - 1
        return OutOfMemory(message=str(error), phase=run.phase, held=measured.at(last))
    return None


class _Run:
    """A model, AdamW with its state, a batch, and the ledger that records their memory."""

    def __init__(self, what: SmallModel, num_samples: int) -> None:
        self.phase: Phase = "forward"
        self._what = what
        self._ledger = MemoryLedger()
        with own_random_numbers():
            self._model = what.make()
        self._optimizer: Optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._pass(what.batch(2))  # creates the optimizer state; BatchNorm needs two samples for a variance
        self._batch = what.batch(num_samples)

    def step(self, budget_bytes: int | None = None) -> None:
        """Make one step: zero, forward, backward, update."""
        ledger, model = self._ledger, self._model
        ledger.phase = "setup"
        ledger.hold("weights", model.parameters())
        ledger.hold("buffers", model.buffers())
        ledger.hold("optimizer", _state_of(self._optimizer))
        ledger.hold("inputs", self._batch.values())
        ledger.phase = None
        with ExitStack() as stack:
            if budget_bytes is not None:
                stack.enter_context(memory_budget(budget_bytes, model, self._optimizer, *self._batch.values()))
            stack.enter_context(ledger)
            try:
                self._pass(self._batch)
            finally:
                # Also after an error, because its report lists the gradients so far.
                ledger.hold("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        self._optimizer.zero_grad()

    def trace(self) -> MemoryTrace:
        """Return the recorded allocations and frees, and stop recording."""
        trace = self._ledger.trace()
        self._ledger.forget()
        return trace

    def _pass(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        self.phase = "forward"
        loss = self._what.loss(self._model, batch)
        self.phase = "backward"
        loss.backward()
        self.phase = self._ledger.phase = "update"
        self._optimizer.step()
        self._ledger.phase = None


def _state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    states = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in states if isinstance(value, torch.Tensor)]
