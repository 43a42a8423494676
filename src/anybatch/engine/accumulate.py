"""The loop over the micro-batches of a step, and their random numbers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.loss import Loss, TermFactors, returned_count, scaled, without_graph
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.core.tensors import widest_dtype
from anybatch.core.tree import Batch
from anybatch.engine.precision import LossScaler
from anybatch.errors import LossError
from anybatch.parallel.strategy import Capabilities, Prepared, Strategy, Turn

Rng = Literal["micro_batch", "per_sample"] | None
_NOTHING = nullcontext()


@dataclass(slots=True)
class Sums:
    """The loss values of a rank's micro-batches, in order, and the counts that the loss function returned."""

    contributions: list[tuple[tuple[TermFactors, ...], Sequence[torch.Tensor]]] = field(default_factory=list)
    returned_counts: list["int | float | torch.Tensor"] = field(default_factory=list)

    def totals(self, loss: Loss, device: torch.device) -> Float[Tensor, " numbers"]:
        """Return a vector of this rank's sum of each term, or [sum, count] if the loss function returns counts."""
        # In float32, sums over many micro-batches lose digits.
        dtype = widest_dtype(device)
        if len(loss.kind.terms) == 1:  # micro-batches with a count of 0 have no value
            columns = [[value for _, values in self.contributions for value in values]]
        else:
            columns = self._columns(len(loss.kind.terms))
        if loss.kind.returns_count:
            columns.append([torch.as_tensor(count, device=device, dtype=dtype) for count in self.returned_counts])
        sums = [_summed(column, dtype, device) for column in columns]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _columns(self, num_terms: int) -> list[list[torch.Tensor]]:
        """Return the contributions of each term."""
        columns: list[list[torch.Tensor]] = [[] for _ in range(num_terms)]
        for factors, values in self.contributions:
            value = iter(values)
            for column, factor in zip(columns, factors, strict=True):
                if factor.has_value:  # false for a mean over no items
                    column.append(next(value))
        return columns


def _summed(values: list[torch.Tensor], dtype: torch.dtype, device: torch.device) -> Float[Tensor, "1"]:
    if len(values) == 1:  # a copy, since the sum over ranks is in place, and observers read this rank's value
        return torch.empty(1, dtype=dtype, device=device).copy_(values[0])
    return (
        torch.stack(values).sum(0, keepdim=True, dtype=dtype) if values else torch.zeros(1, dtype=dtype, device=device)
    )


class MicroBatch(NamedTuple):
    """One micro-batch without its data; a tuple for speed."""

    unit: Unit
    factors: tuple[TermFactors, ...]
    turn: Turn  # whether it is the first or the last micro-batch of this rank's step
    seed: int
    key: BatchKey


class Randomness:
    """The random numbers of micro-batches. This base class, for `rng=None`, seeds nothing.

    Attributes:
        generators: torch's default generators of the CPU and the rank's device.
        covers_backward: whether a backward must run inside the context of its forward.
        advances: whether steps advance the caller's generators.
    """

    covers_backward = False
    advances = True

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator]
        if device.type != "cpu" and (by_index := getattr(torch.get_device_module(device), "default_generators", None)):
            index = device.index
            self.generators.append(by_index[torch.accelerator.current_device_index() if index is None else index])

    def __enter__(self) -> Self:
        """Begin an effective batch."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        return

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:  # noqa: ARG002 (subclasses)
        """Seed the random numbers of one forward and backward; repeating a micro-batch repeats its numbers."""
        return _NOTHING

    def seed_effective_batch(self, seed: int) -> None:
        """Seed the numbers that are drawn once for the effective batch, outside of any micro-batch."""

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context in which another micro-batch may draw random numbers without affecting the current one."""
        return _NOTHING


class KeyedRandomness(Randomness):
    """Seeds torch's generators per micro-batch, and restores the caller's state at the end.

    Only torch's default generators are seeded, so a model that uses Python's or numpy's is not reproducible.
    """

    advances = False

    def __enter__(self) -> Self:
        self._states = [generator.get_state() for generator in self.generators]
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for generator, state in zip(self.generators, self._states, strict=True):
            generator.set_state(state)

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Seed the random numbers of one micro-batch."""
        # `torch.manual_seed` is a hundred times slower: it visits every kind of device, and keeps a traceback for each
        # that is not initialised.
        for generator in self.generators:
            generator.manual_seed(micro_batch.seed)
        return _NOTHING

    def seed_effective_batch(self, seed: int) -> None:
        """Seed the numbers that are drawn once for the effective batch, so that they do not depend on its split."""
        for generator in self.generators:
            generator.manual_seed(seed)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore the generators on exit, so that another micro-batch does not change the current one's numbers."""
        states = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)


Before = Callable[[MicroBatch], None]
After = Callable[[MicroBatch, Sequence[Float[Tensor, ""]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopContext:
    """The parts that the loop uses, chosen once, so that the loop itself makes no decisions.

    Attributes:
        loss: the declared loss.
        strategy: sums gradients over ranks.
        prepared: the model, prepared by the strategy.
        scaler: scales the loss before its backward, with fp16.
        autocast: makes the autocast context of a forward.
        forward: makes the context of one micro-batch's forward: autocast, and the set-up of BatchNorm layers.
        randomness: seeds random numbers.
        before: called before each micro-batch.
        after: called after each micro-batch, with its detached contribution to each term.
        notifier: a `Notifier`, called before and after each micro-batch if it has observers; None in trial runs.
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
    notifier: Any = None

    def callbacks(self) -> tuple[tuple[Before, ...], tuple[After, ...]]:
        """Return the functions to call before and after each micro-batch of a step."""
        notifier = self.notifier
        if notifier is None or not notifier.observers:
            return self.before, self.after
        return (*self.before, notifier.before), (*self.after, notifier.after)


def accumulate(context: LoopContext, micro_batches: Iterable[tuple[MicroBatch, Batch]]) -> Sums:
    """Add up the exact gradient of one effective batch, micro-batch by micro-batch.

    It equals the gradient of `sum(losses) / count` over all samples of all ranks, where `count` is the number of items
    in the *whole* effective batch: every micro-batch's sum is divided by it before its backward, and gradients add up.
    """
    call, inputs = context.prepared.call, context.prepared.backward_inputs
    scale = context.scaler.scale if context.scaler.enabled else None
    before, after = context.callbacks()
    sums = Sums()

    # 1. Fetch a micro-batch. Its copy to the device has overlapped with the previous micro-batch.
    for micro_batch, batch in micro_batches:
        for callback in before:
            callback(micro_batch)
        # 2. Forward; the loss is divided by the effective batch's count. The last backward starts the reduction.
        with context.randomness.micro_batch(micro_batch), context.strategy.micro_batch(micro_batch.turn):
            with context.forward(micro_batch):
                terms = call(forward_of(context.loss, micro_batch, sums), batch)
            # 3. Backward: gradients add up.
            total = terms[0] if len(terms) == 1 else torch.stack(terms).sum()
            if total.requires_grad:
                torch.autograd.backward(total if scale is None else scale(total), inputs=inputs)
            else:
                _check_has_graph(total, context.strategy.capabilities)
        # 4. Keep the loss values for the report, on the device.
        contributions = [term.detach() for term in terms]
        sums.contributions.append((micro_batch.factors, contributions))
        for observe in after:
            observe(micro_batch, contributions)
    return sums


def _check_has_graph(total: Float[Tensor, ""], capabilities: Capabilities) -> None:
    """Raise a `LossError` for a loss without a graph. A constant zero is allowed if the strategy needs no backward."""
    if not torch.is_grad_enabled() or bool(total != 0):
        raise without_graph()
    if capabilities.lockstep or capabilities.prepares_in_forward:
        message = (
            "the loss of a micro-batch is a constant zero, and strategy "
            f"{capabilities.name!r} needs a backward in each. "
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
            error.add_note(f"anybatch: in the loss function, on {samples} (micro-batch {unit.number}, counted from 0).")
            if isinstance(batch, list) and batch and isinstance(batch[0], Mapping | tuple):
                error.add_note(
                    f"anybatch: the batch is a list of {len(batch)} samples. For a dict of tensors, collate it first: "
                    "engine.step(torch.utils.data.default_collate(samples)), or use ab.batches(samples, ...)."
                )
            raise
        terms = scaled(loss, output, factors)
        if loss.kind.returns_count and factors[0].of_sum:  # 0 for a filler, which only keeps ranks in lockstep
            sums.returned_counts.append(returned_count(output))
        return terms

    return compute_terms
