"""The hot loop."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Loss, TermFactors, returned_count, scaled, without_graph
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tensors import widest_dtype
from anybatch.core.torch_internals import dense_values, multiply_each
from anybatch.core.tree import Batch
from anybatch.engine.precision import LossScaler
from anybatch.errors import LossError
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.strategy import Capabilities, Prepared, Strategy, Turn


@dataclass(slots=True)
class Sums:
    """Contributions of the micro-batches of one rank share, in the order they ran."""

    contributions: list[tuple[tuple[TermFactors, ...], Sequence[torch.Tensor]]] = field(default_factory=list)
    late_counts: list["int | float | torch.Tensor"] = field(default_factory=list)

    def totals(self, loss: Loss, device: torch.device) -> Float[Tensor, " numbers"]:
        """Return this rank's contributions (terms,), or (contribution, count) if the loss function returns counts."""
        # Sums of many micro-batches lose digits in float32.
        dtype = widest_dtype(device)
        if len(loss.kind.terms) == 1:  # micro-batches with a count of 0 have no value
            columns = [[value for _, values in self.contributions for value in values]]
        else:
            columns = self._columns(len(loss.kind.terms))
        if loss.kind.brings_count:
            columns.append([torch.as_tensor(count, device=device, dtype=dtype) for count in self.late_counts])
        sums = [_summed(column, dtype, device) for column in columns]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _columns(self, num_terms: int) -> list[list[torch.Tensor]]:
        """Return the contributions of each term."""
        columns: list[list[torch.Tensor]] = [[] for _ in range(num_terms)]
        for factors, values in self.contributions:
            value = iter(values)
            for column, factor in zip(columns, factors, strict=True):
                # A mean with a count of 0 in a micro-batch has no value.
                if factor.has_value:
                    column.append(next(value))
        return columns


def _summed(values: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "1"]:
    if len(values) == 1:  # a copy, since ranks sum it in place, and observers read this rank's value
        return torch.empty(1, dtype=dtype, device=device).copy_(values[0])
    return (
        torch.stack(values).sum(0, keepdim=True, dtype=dtype) if values else torch.zeros(1, dtype=dtype, device=device)
    )


class LateDivision:
    """Divides by a count that the loss function returned, after all ranks agreed on the step, without allocating.

    Its memory is allocated in advance, when out of memory can still repeat the step on all ranks.
    """

    def __init__(self, guess: float, device: torch.device, dtype: torch.dtype) -> None:
        self._guess = guess
        self._factor = torch.empty(1, dtype=widest_dtype(device), device=device)
        self._factor_of_gradients = torch.empty((), dtype=dtype, device=device)

    @torch.no_grad()
    def divide(
        self, gradients: Sequence[torch.Tensor], totals: Float[Tensor, "2"]
    ) -> tuple[Float[Tensor, "1"], Float[Tensor, "1"]]:
        """Divide gradients and the contribution in place; return (contributions, counts), views of `totals`."""
        contribution, count = totals[:1], totals[1:]
        # The gradients were already divided by the guess.
        torch.reciprocal(count, out=self._factor).mul_(self._guess)
        if gradients:
            self._factor_of_gradients.copy_(self._factor[0])
            multiply_each([dense_values(local_part(g)) for g in gradients], self._factor_of_gradients)
        return contribution.mul_(self._factor), count


class MicroBatch(NamedTuple):
    """One micro-batch without its data; a tuple for speed."""

    unit: Unit
    factors: tuple[TermFactors, ...]
    turn: Turn
    seed: int
    key: BatchKey


class Audience(Protocol):
    """Reports micro-batches to observers."""

    observers: tuple[Any, ...]

    def before(self, micro_batch: MicroBatch) -> None:
        """Report the start of a micro-batch."""
        ...

    def after(self, micro_batch: MicroBatch, contributions: Sequence[torch.Tensor]) -> None:
        """Report the end of a micro-batch."""
        ...


class Randomness(Protocol):
    """The source of the micro-batches' random numbers, entered for one effective batch."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Seed the random numbers of one forward and backward; repeating a micro-batch repeats its numbers."""
        ...

    def whole(self, seed: int) -> None:
        """Seed the numbers that are drawn once for the effective batch, outside of any micro-batch."""
        ...

    @property
    def covers_backward(self) -> bool:
        """Whether a backward must run inside the context of its forward."""
        ...

    def parked(self) -> AbstractContextManager[object]:
        """Return a context in which another micro-batch may draw without effect on this one."""
        ...


Before = Callable[[MicroBatch], None]
After = Callable[[MicroBatch, Sequence[Float[Tensor, ""]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """The parts that the loop uses, put together once, so that running a plan makes no decisions.

    Attributes:
        loss: the declared loss.
        strategy: sums over ranks.
        prepared: the model, prepared by the strategy.
        scaler: scales the loss before its backward, under fp16.
        autocast: makes the autocast context of a forward.
        forward: makes the context of one micro-batch's forward: autocast, and the set-up of BatchNorm layers.
        randomness: keys random numbers.
        before: called before each micro-batch.
        after: called after each micro-batch, with its detached contribution to each term.
        audience: called before and after each micro-batch if it has observers; None for no audience.
    """

    loss: Loss
    strategy: Strategy
    prepared: Prepared
    scaler: LossScaler
    autocast: Callable[[], AbstractContextManager[object]]
    forward: Callable[[MicroBatch], AbstractContextManager[object]]
    randomness: Randomness
    before: tuple[Before, ...] = ()
    after: tuple[After, ...] = ()
    audience: Audience | None = None

    def callbacks(self) -> tuple[tuple[Before, ...], tuple[After, ...]]:
        """Return the functions to call before and after each micro-batch of a step."""
        audience = self.audience
        if audience is None or not audience.observers:
            return self.before, self.after
        return (*self.before, audience.before), (*self.after, audience.after)


def accumulate(context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
    """Add up the gradient of one effective batch, micro-batch by micro-batch, exactly.

    Equal to one backward of `sum(losses) / count` over all samples of all ranks: every micro-batch's sum is divided by
    the count of the *whole* effective batch before its backward, and gradients add.
    """
    call, inputs = context.prepared.call, context.prepared.backward_inputs
    scale = context.scaler.scale if context.scaler.enabled else None
    before, after = context.callbacks()
    sums = Sums()

    # 1. Fetch a micro-batch; its copy to the device overlaps with the previous micro-batch.
    for micro_batch, batch in micro_batches:
        for look in before:
            look(micro_batch)
        # 2. Forward, divided by the count of the effective batch; reduction starts in the last micro-batch only.
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(micro_batch.turn):
            with context.forward(micro_batch):
                terms = call(forward_of(context.loss, micro_batch, sums), batch)
            # 3. Backward: gradients add up.
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            if total.requires_grad:
                torch.autograd.backward(total if scale is None else scale(total), inputs=inputs)
            else:
                _refuse_constant(total, context.strategy.capabilities)
        # 4. Save the contributions for the report, on the device.
        contributions = [term.detach() for term in terms]
        sums.contributions.append((micro_batch.factors, contributions))
        for note in after:
            note(micro_batch, contributions)
    return sums


def _refuse_constant(total: Float[Tensor, ""], needs: Capabilities) -> None:
    """Raise a `LossError` for a loss without a graph, except for a zero, which adds nothing to the gradient."""
    if not torch.is_grad_enabled() or bool(total != 0):
        raise without_graph()
    if needs.lockstep or needs.prepares_in_forward:
        message = (
            f"the loss of a micro-batch is a constant zero, and strategy {needs.name!r} needs a backward in each. "
            "Return a zero that depends on the model, such as outputs.sum() * 0, or use strategy='all_reduce'."
        )
        raise LossError(message)


def forward_of(loss: Loss, micro_batch: MicroBatch, sums: Sums) -> Callable[[object, Batch], list[torch.Tensor]]:
    """Return the function that runs one forward, for wrappers that call it, such as DDP."""
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
        if loss.kind.brings_count and factors[0].of_sum:  # 0 for a filler unit
            sums.late_counts.append(returned_count(output))
        return terms

    return compute_terms
