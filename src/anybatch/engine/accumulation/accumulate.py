"""The hot loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Loss, TermFactors, returned_count, scaled, without_graph
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.update.precision import LossScaler
from anybatch.errors import LossError
from anybatch.parallel.strategy import Capabilities, Prepared, Strategy, Turn


class MicroBatch(NamedTuple):
    """One micro-batch but for its data. A tuple, since they are many.

    Attributes:
        unit: which samples of the effective batch.
        factors: per loss term what its value is multiplied with before the backward.
        turn: whether it is the rank's first or last one of the effective batch.
        seed: of its own random numbers.
        key: of the effective batch, with the ids of all its samples.
    """

    unit: Unit
    factors: tuple[TermFactors, ...]
    turn: Turn
    seed: int
    key: BatchKey


class Randomness(Protocol):
    """Where micro-batches take their random numbers from; entered for one effective batch."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Start the random numbers of one forward and backward. The same micro-batch again draws the same numbers."""
        ...

    def whole(self, seed: int) -> None:
        """Start the random numbers of what is drawn once for the effective batch, outside of any micro-batch."""
        ...

    @property
    def covers_backward(self) -> bool:
        """Whether a backward has to run inside the context of its own forward."""
        ...

    def parked(self) -> AbstractContextManager[object]:
        """Return a context around what another micro-batch draws in the middle of this one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """Everything the loop uses; put together once, so that running a plan takes no decisions.

    Attributes:
        loss: the declared loss.
        strategy: sums over ranks.
        prepared: what the strategy has made of the model.
        scaler: scales the loss before its backward, under fp16.
        autocast: makes the autocast context of a forward.
        forward: makes the context of one micro-batch's forward: autocast, and what BatchNorm layers need.
        randomness: keys random numbers.
        before: called before each micro-batch, for observers.
        after: called after each, with its contribution to each term, detached.
    """

    loss: Loss
    strategy: Strategy
    prepared: Prepared
    scaler: LossScaler
    autocast: Callable[[], AbstractContextManager[object]]
    forward: Callable[[MicroBatch], AbstractContextManager[object]]
    randomness: Randomness
    before: Callable[[MicroBatch], None]
    after: Callable[[MicroBatch, Sequence[Float[Tensor, ""]]], None]


def accumulate(context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
    """Add up the gradient of one effective batch, micro-batch by micro-batch, exactly.

    Equal to one backward of `sum(losses) / count` over all samples of all ranks: every micro-batch's sum is divided by
    the count of the *whole* effective batch before its backward, and gradients add.

    Args:
        context: what the loop uses.
        micro_batches: this rank's, in order, each with its data on the device.

    Returns:
        The contributions to the loss. Gradients are left where the strategy adds them up.
    """
    call, scale, inputs = context.prepared.call, context.scaler.scale, context.prepared.backward_inputs
    sums = Sums()

    # 1. Fetch a micro-batch; the copy to the device runs while the one before still computes.
    for micro_batch, batch in micro_batches:
        context.before(micro_batch)
        # 2. Forward, divided by the count of the effective batch; reduction starts in the last micro-batch only.
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(micro_batch.turn):
            with context.forward(micro_batch):
                terms = call(forward_of(context.loss, micro_batch, sums), batch)
            # 3. Backward: gradients add up.
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            if total.requires_grad:
                torch.autograd.backward(scale(total), inputs=inputs)
            else:
                _refuse_constant(total, context.strategy.capabilities)
        # 4. Keep what will be reported, on the device.
        contributions = [term.detach() for term in terms]
        sums.contributions.append((micro_batch.factors, contributions))
        context.after(micro_batch, contributions)
    return sums


def _refuse_constant(total: Float[Tensor, ""], needs: Capabilities) -> None:
    """Refuse a loss without a graph, unless it is a zero, which adds nothing to the gradient.

    Raises:
        LossError: with a remedy.
    """
    if not torch.is_grad_enabled() or bool(total != 0):
        raise without_graph()
    if needs.lockstep or needs.prepares_in_forward:
        message = (
            f"the loss of a micro-batch is a constant zero, and strategy {needs.name!r} needs a backward in each. "
            "Return a zero that depends on the model, such as outputs.sum() * 0, or use strategy='all_reduce'."
        )
        raise LossError(message)


def forward_of(loss: Loss, micro_batch: MicroBatch, sums: Sums) -> Callable[[object, Batch], list[torch.Tensor]]:
    """Return the function that runs one forward; a wrapper may want to call it (DDP does)."""
    unit, factors = micro_batch.unit, micro_batch.factors

    def compute_terms(model: object, batch: Batch) -> list[torch.Tensor]:
        try:
            output = loss.function(model, batch)
        except Exception as error:
            samples = f"samples {unit.start} to {unit.stop - 1} of the effective batch"
            error.add_note(f"anybatch: in the loss function, on {samples} (its micro-batch {unit.number}, from 0 on).")
            if isinstance(batch, list) and batch and isinstance(batch[0], Mapping | tuple):
                error.add_note(
                    f"anybatch: the batch is a list of {len(batch)} samples. For a dict of tensors, collate it first: "
                    "engine.step(torch.utils.data.default_collate(samples)), or use ab.batches(samples, ...)."
                )
            raise
        terms = scaled(loss, output, factors)
        if loss.kind.brings_count and factors[0].of_sum:  # 0 for a unit that only keeps ranks in lockstep
            sums.late_counts.append(returned_count(output))
        return terms

    return compute_terms
