"""Two adapters: the engine, and the loop that people write by hand, right or with one of its known faults."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from anybatch.core.loss import Loss, counted, sum_of
from anybatch.core.loss_kinds import Term as EngineTerm
from anybatch.engine.engine import Engine
from anybatch.testing.conformance.protocol import (
    LossTerms,
    Samples,
    SplitCase,
    TrainerStep,
    gradients_of,
    num_samples,
    parts,
)

LoopFault = Literal["constant divisor", "mean of means", "dropped tail", "duplicated samples"]


class EngineAdapter:
    """`anybatch.Engine`, through its public interface.

    Args:
        strategy: strategy of the engine.
    """

    name = "anybatch"

    def __init__(self, strategy: str = "auto") -> None:
        self._strategy = strategy

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Yield the engine's gradient of each effective batch."""
        model, first = split.model(), 0
        with Engine(
            model,
            # Only gradients are asked for, and this optimizer changes no parameter.
            lambda named: torch.optim.SGD(named, lr=0.0),
            declaration(split.loss),
            micro_batch_size=split.micro_batch_size,
            strategy=self._strategy,
        ) as engine:
            for batch in parts(split.samples(), split.effective_batch_size):
                last = first + num_samples(batch)
                found = {
                    # The engine reuses its gradients in the next step.
                    name: None if gradient is None else gradient.clone()
                    for name, gradient in engine.gradients(batch).items()
                }
                yield TrainerStep(found, tuple(range(first, last)))
                first = last


def declaration(loss: LossTerms) -> Loss:
    """Return a loss with the declaration that the engine needs."""
    terms: dict[str, EngineTerm] = {term.name: counted(term.count, weight=term.weight) for term in loss.terms}
    return sum_of(loss.function, **terms)


@dataclass(frozen=True, slots=True)
class HandWrittenLoop:
    """Gradient accumulation as usually written by hand.

    Without a fault, it correctly divides every micro-batch's sums by the counts of its window. With one:

    - "mean of means" divides each micro-batch's mean loss by the number of micro-batches of the window;
    - "constant divisor" divides it by the number of micro-batches of a full window;
    - "dropped tail" skips the step of a window that is not full;
    - "duplicated samples" fills the last window up with the first samples, and is right otherwise.
    """

    fault: LoopFault | None = None

    @property
    def name(self) -> str:
        """Its fault."""
        return f"hand-written loop: {self.fault or 'right'}"

    def steps(self, split: SplitCase) -> Iterator[TrainerStep]:
        """Yield the gradient of each window."""
        samples, size = split.samples(), split.effective_batch_size
        ids = torch.arange(num_samples(samples))
        for window in ids.split(size):
            if self.fault == "dropped tail" and len(window) < size:
                return
            padding = size - len(window) if self.fault == "duplicated samples" else 0
            filled = torch.cat([window, ids.repeat(-(-padding // len(ids)))[:padding]]) if padding else window
            batch = {name: value[filled] for name, value in samples.items()}
            losses = self._losses(split, batch)
            yield TrainerStep(gradients_of(split.model(), *losses), tuple(filled.tolist()))

    def _losses(self, split: SplitCase, batch: Samples) -> list[Callable[[nn.Module], Tensor]]:
        """Return the loss of each micro-batch, ready for its backward."""
        micro_batches = parts(batch, split.micro_batch_size)
        if self.fault == "constant divisor":
            divisor = -(-split.effective_batch_size // split.micro_batch_size)
        else:
            divisor = len(micro_batches)
        if self.fault in ("constant divisor", "mean of means"):
            return [partial(_plain_mean, split.loss, part, divisor) for part in micro_batches]
        return [partial(_share, split.loss, part, batch) for part in micro_batches]


def _plain_mean(loss: LossTerms, part: Samples, divisor: int, model: nn.Module) -> Tensor:
    """Return a micro-batch's mean loss, of any kind, divided by a number of micro-batches."""
    means = loss.function(model, part)
    return torch.stack([term.weight * means[term.name] for term in loss.terms]).sum() / divisor


def _share(loss: LossTerms, part: Samples, batch: Samples, model: nn.Module) -> Tensor:
    """Return a micro-batch's sums divided by the counts of its window, without terms that count nothing here."""
    means = loss.function(model, part)
    counts = [(term, term.count(part), term.count(batch)) for term in loss.terms]
    shares = [term.weight * means[term.name] * here / all_ for term, here, all_ in counts if here]
    # If nothing counts, a zero with a graph, so that the backward still runs.
    return torch.stack(shares).sum() if shares else next(iter(means.values())).nan_to_num(0.0) * 0.0
