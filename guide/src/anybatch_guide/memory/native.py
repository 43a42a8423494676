"""A step of ordinary PyTorch, without accumulation: what it holds, and what torch says where that is too much."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from anybatch.memory.ledger import MemoryLedger
from anybatch.memory.timeline import timeline
from anybatch.memory.trace import MemoryTrace, Phase
from anybatch.testing import memory_budget
from anybatch_guide.memory.small import Batch, SmallModel, own_random_numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutOfMemory:
    """A step that ran out of memory.

    Attributes:
        message: what the error says.
        phase: forward, backward or update.
        held: what tensors held by then, by what they are held for; the piece that was refused is not in it.
    """

    message: str
    phase: Phase
    held: Mapping[str, int]


def trace_native(what: SmallModel, num_samples: int) -> MemoryTrace:
    """Return all allocations and frees of tensors in a step like all but the first, on so many samples at once."""
    run = _Run(what, num_samples)
    run.step()
    return run.trace()


def try_native(what: SmallModel, num_samples: int, budget_bytes: int) -> OutOfMemory | None:
    """Run the same step where tensors may hold so many bytes; return how it failed, None if it did not."""
    run = _Run(what, num_samples)
    try:
        run.step(budget_bytes)
    except torch.OutOfMemoryError as error:
        course = timeline(run.trace())
        last = len(course.totals) - 1
        return OutOfMemory(message=str(error), phase=run.phase, held=course.at(last))
    return None


class _Run:
    """A model, its AdamW with its state, and a batch; and the ledger that looks on."""

    def __init__(self, what: SmallModel, num_samples: int) -> None:
        self.phase: Phase = "forward"
        self._what = what
        self._ledger = MemoryLedger()
        with own_random_numbers():
            self._model = what.make()
        self._optimizer: Optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        self._pass(what.batch(2))  # makes the optimizer's state; of one sample there is no variance to normalise by
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
                # Also after an error: its report names the gradients made so far.
                ledger.hold("gradients", (one.grad for one in model.parameters() if one.grad is not None))
        self._optimizer.zero_grad()

    def trace(self) -> MemoryTrace:
        """Return what was booked, and stop."""
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
