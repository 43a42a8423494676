"""The hot loop."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Loss, TermFactors, returned_count, with_factors
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tree import Batch
from anybatch.engine.accumulation.sums import Sums
from anybatch.engine.update.precision import LossScaler
from anybatch.parallel.strategy import Prepared, Strategy, Turn

_ONE = [1.0]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch but for its data.

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
    sums, seeds = Sums(), _Seeds()

    # 1. Fetch a micro-batch; the copy to the device runs while the one before still computes.
    for micro_batch, batch in micro_batches:
        context.before(micro_batch)
        # 2. Forward; reduction starts in the last micro-batch only.
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(micro_batch.turn):
            with context.forward(micro_batch):
                values = call(forward_of(context.loss, micro_batch, sums), batch)
            # 3. Backward, divided by the count of the effective batch: it begins with that. Gradients add up.
            _backward(list(map(scale, values)), sums.factors, seeds, inputs)
        # 4. Keep what will be reported, on the device.
        contributions = _contributions(values, sums.factors, micro_batch.turn)
        sums.contributions.append((micro_batch.factors, contributions))
        context.after(micro_batch, contributions)
    return sums


def _backward(
    losses: Sequence[Tensor], factors: Sequence[float], seeds: "_Seeds", inputs: Sequence[Tensor] | None
) -> None:
    """Run the backward of the sum of `loss * factor`; a product would be a node, with a backward of its own."""
    pairs = list(zip(losses, factors, strict=True))
    if len(pairs) > 1:  # of several terms one may be a constant
        pairs = [(loss, factor) for loss, factor in pairs if loss.requires_grad] or pairs
    torch.autograd.backward(
        [loss for loss, _ in pairs], [seeds.of(loss, factor) for loss, factor in pairs], inputs=inputs
    )


def _contributions(values: Sequence[Tensor], factors: Sequence[float], turn: Turn) -> Sequence[Tensor]:
    """Return each `value * factor`, detached."""
    if turn.first and turn.last and factors == _ONE:
        return [values[0].detach()]
    # Copies, also where a factor is 1: the user may have kept a loss, and add the next micro-batch's to it in place.
    return [value.detach() * factor for value, factor in zip(values, factors, strict=True)]


class _Seeds(dict[tuple[float, torch.dtype, torch.device], torch.Tensor]):
    """Gradients that backwards begin with: the factor of a value, in its type. Most micro-batches have one factor."""

    def of(self, value: torch.Tensor, factor: float) -> torch.Tensor | None:
        """Return the gradient of `value * factor` with respect to the value; None for the 1 that torch makes itself."""
        if factor == 1.0:
            return None
        key = (factor, value.dtype, value.device)
        if key not in self:
            self[key] = value.detach().new_full((), factor)
        return self[key]


def forward_of(loss: Loss, micro_batch: MicroBatch, sums: Sums) -> Callable[[object, Batch], list[torch.Tensor]]:
    """Return the function that runs one forward; a wrapper may want to call it (DDP does)."""
    unit, factors = micro_batch.unit, micro_batch.factors

    def compute_values(model: object, batch: Batch) -> list[torch.Tensor]:
        try:
            output = loss.function(model, batch)
        except Exception as error:
            samples = f"samples {unit.start} to {unit.stop - 1} of the effective batch"
            error.add_note(f"anybatch: in the loss function, on {samples} (its micro-batch {unit.number}, from 0 on).")
            raise
        pairs = with_factors(loss, output, factors)
        sums.factors = [factor for _, factor in pairs]
        if loss.kind.brings_count and factors[0].of_sum:  # 0 for a unit that only keeps ranks in lockstep
            sums.late_counts.append(returned_count(output))
        return [value for value, _ in pairs]

    return compute_values
