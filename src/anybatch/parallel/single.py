"""One device: the reference for every other strategy."""

from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.core.tensors import is_low_precision
from anybatch.parallel.gradient_buckets import FirstGradientCopies, GradientBuffers
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionNotifier, Turn, caller_of, trainable
from anybatch.parallel.world import World

_NULL_CONTEXT = nullcontext()


class LocalSums:
    """Base of the strategies in one process.

    Gradients accumulate in `.grad`, and for bf16 and fp16 parameters in separate float32 buffers.
    """

    capabilities: Capabilities

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._buffers: GradientBuffers | None = None
        self._first_copies = FirstGradientCopies()

    def prepare(self, modules: nn.Module, model: object, world: World, notifier: ReductionNotifier) -> Prepared:
        """Register the parameters; nothing is wrapped."""
        del world, notifier
        parameters = trainable(modules)
        self._parameters = list(parameters.values())
        low = [parameter for parameter in self._parameters if is_low_precision(parameter)]
        self._buffers = GradientBuffers(low) if low else None
        self._first_copies = FirstGradientCopies([p for p in self._parameters if not is_low_precision(p)])
        return Prepared(
            parameters=parameters,
            call=caller_of(model),
            # Only this engine's parameters: a loss may run another engine's model, as in a GAN.
            backward_inputs=tuple(self._parameters),
            gradient_buffers=() if self._buffers is None else self._buffers.flats,
            abort=lambda _: _no_collective,
        )

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return a context that copies first gradients, since a later backward may overwrite them."""
        return _NULL_CONTEXT if turn.last else self._first_copies

    def finish_gradients(
        self, report_sums: Float[Tensor, " sums"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " sums"]]:
        """Return the gradients accumulated in this process."""
        for parameter in self._parameters:
            # Accumulated sparse gradients repeat an index per micro-batch; norms and clipping need each index once.
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        if self._buffers is None:
            return [parameter.grad for parameter in self._parameters], report_sums
        wide = iter(self._buffers.gradients(self._buffers.used))
        gradients = [next(wide) if is_low_precision(parameter) else parameter.grad for parameter in self._parameters]
        return gradients, report_sums

    def place_gradients(self) -> None:
        """Set every `.grad` to None; gradients of bf16 and fp16 parameters accumulate in their buffers."""
        self._first_copies.pending = self._first_copies.parameters
        for parameter in self._parameters:
            parameter.grad = None
        if self._buffers is not None:
            self._buffers.place()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None and the float32 buffers to zero."""
        for parameter in self._parameters:
            parameter.grad = None
        if self._buffers is not None:
            self._buffers.clear()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers unchanged: there are no other ranks."""
        return numbers

    def close(self) -> None:
        """Remove the hooks of the float32 buffers."""
        if self._buffers is not None:
            self._buffers.close()


class Single(LocalSums):
    """One rank."""

    capabilities = Capabilities(name="single", feature=Feature.SINGLE, sparse_gradients=True)


def _no_collective() -> None:
    """Abort on one rank: no collective is pending."""
