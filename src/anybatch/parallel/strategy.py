"""The contract of every way of using devices."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.loss import LossFunction
from anybatch.core.tree import Batch
from anybatch.parallel.world import World

ReductionObserver = Callable[[int, int, torch.dtype], None]
"""Told (bucket number, bytes, dtype) whenever a gradient reduction is handed to a collective."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a micro-batch stands in its rank share."""

    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a strategy can do and what it demands; the engine asks this and never the strategy's type.

    Attributes:
        name: as written in reports.
        lockstep: every rank must run the same number of micro-batches.
        replaces_parameters: the optimizer has to be built after `prepare`, by a function.
        float32_accumulation: gradients of bf16 and fp16 parameters can be accumulated and reduced in float32.
        sparse_gradients: parameters may have sparse gradients.
        prepares_in_forward: the forward of the last micro-batch prepares the reduction, so it must have run in its turn
            and have met every parameter that its backward will reach.
    """

    name: str
    lockstep: bool = False
    replaces_parameters: bool = False
    float32_accumulation: bool = True
    sparse_gradients: bool = False
    prepares_in_forward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What a strategy makes of a model.

    Attributes:
        parameters: the trainable parameters by name; the optimizer is built over these.
        call: runs `function(model, batch)` with the user's own model, inside whatever wrapper the strategy needs.
        backward_inputs: the leaves a backward accumulates into; None for all that it reaches.
        differed: names of what was not equal on all ranks before and is now.
        gradient_buffers: where gradients add up, apart from `.grad`.
        give_up: takes what `finish_gradients` is going to be given, once, and returns what a rank calls that cannot go
            on because its memory has run out: it takes part in every collective that the other ranks have started or
            will start for this effective batch, in their order, and tells them, so that `finish_gradients` raises
            `AbandonedError` there. It raises `CannotRedoError`, with a clause, where it is too late for that.
            None: the strategy cannot do this.
    """

    parameters: Mapping[str, nn.Parameter]
    call: Callable[[LossFunction, Batch], Any]
    backward_inputs: tuple[torch.Tensor, ...] | None = None
    differed: tuple[str, ...] = ()
    gradient_buffers: tuple[torch.Tensor, ...] = ()
    give_up: "Callable[[Float[Tensor, ' numbers']], Callable[[], None]] | None" = None


class Strategy(Protocol):
    """Sums gradients and numbers over micro-batches and ranks. It never divides: the engine does, once."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do and what it demands."""
        ...

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Take hold of the trainable parameters of `modules`; `model` is what loss functions are called with."""
        ...

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return the context of one forward and backward. Reduction starts in the last one, if anywhere."""
        ...

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Wait, once, for everything that ranks have to sum at the end of an effective batch.

        Args:
            numbers: a small tensor on the device that travels beside the gradients.

        Returns:
            The gradient of each parameter summed over all ranks, None for one that no rank used; and the summed
            numbers.

        Raises:
            AbandonedError: a rank has given up, see `Prepared.give_up`. All collectives are over.
        """
        ...

    def clear_gradients(self) -> None:
        """Forget all gradients, also half-finished ones."""
        ...

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a small tensor on the device, without waiting for the device."""
        ...

    def close(self) -> None:
        """Let go of the model: no hook stays behind."""
        ...


def trainable(modules: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients by name; tied ones once, under their first name."""
    return {name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad}
