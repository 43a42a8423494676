"""The hot loop."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Loss, Share, returned_count, scaled
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.update.precision import LossScaler
from anybatch.parallel.strategy import Prepared, Strategy, Turn


@dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch but for its data: its unit, what its loss terms count for, its turn and its random numbers.

    `seed` is the micro-batch's own; `key` is the effective batch's, with the ids of all its samples.
    """

    unit: Unit
    shares: tuple[Share, ...]
    turn: Turn
    seed: int
    key: BatchKey


class Randomness(Protocol):
    """Where micro-batches take their random numbers from; entered for one effective batch."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def micro_batch(self, work: Work) -> AbstractContextManager[object]:
        """Start the random numbers of one forward and backward. The same work again draws the same numbers."""
        ...

    def rewind(self) -> None:
        """Put the caller's generators back to where they were when this was entered last."""
        ...

    def whole(self, seed: int) -> None:
        """Start the random numbers of what is drawn once for the effective batch, outside of any micro-batch."""
        ...

    @property
    def covers_backward(self) -> bool:
        """Whether a backward has to run inside the context of its own forward."""
        ...

    def parked(self) -> AbstractContextManager[object]:
        """Return a context around what another micro-batch does in the middle of this one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything the loop uses; put together once, so that nothing is decided while it runs."""

    loss: Loss
    strategy: Strategy
    prepared: Prepared
    scaler: LossScaler
    autocast: Callable[[], AbstractContextManager[object]]
    randomness: Randomness
    before: Callable[[Work], None]
    after: Callable[[Work, Sequence[Float[Tensor, ""]]], None]


def accumulate(machine: Machine, work: Iterable[tuple[Work, Batch]]) -> Sums:
    """Add up the gradient of one effective batch, micro-batch by micro-batch, exactly.

    Equal to one backward of `sum(losses) / count` over all samples of all ranks: every micro-batch's sum is divided by
    the count of the *whole* effective batch before its backward, and gradients add.
    """
    call, scale, inputs = machine.prepared.call, machine.scaler.scale, machine.prepared.backward_inputs
    sums = Sums()

    # 1. Fetch a micro-batch; the copy to the device runs while the one before still computes.
    for item, batch in work:
        machine.before(item)
        # 2. Forward, divided by the count of the effective batch; reduction starts in the last micro-batch only.
        with machine.randomness.micro_batch(item), machine.strategy.micro_batch(item.turn):
            with machine.autocast():
                terms = call(forward_of(machine.loss, item.shares, sums), batch)
            # 3. Backward: gradients add up.
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            torch.autograd.backward(scale(total), inputs=inputs)
        # 4. Keep what will be reported, on the device.
        contributions = [term.detach() for term in terms]
        sums.contributions.append((item.shares, contributions))
        machine.after(item, contributions)
    return sums


def forward_of(loss: Loss, shares: tuple[Share, ...], sums: Sums) -> Callable[[object, Batch], list[torch.Tensor]]:
    """Return the function that runs one forward; a wrapper may want to call it (DDP does)."""

    def run(model: object, batch: Batch) -> list[torch.Tensor]:
        output = loss.function(model, batch)
        terms = scaled(loss, output, shares)
        if loss.terms is None and shares[0].of_sum:  # 0 for a unit that only keeps ranks in lockstep
            sums.late_counts.append(returned_count(output))
        return terms

    return run
