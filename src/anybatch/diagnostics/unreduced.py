"""A step of one rank of several without communication; the difference to a real step is communication."""

from contextlib import AbstractContextManager
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.engine.arguments import Hardware
from anybatch.parallel.single import Single
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionObserver, Turn
from anybatch.parallel.world import World


class Unreduced:
    """Runs a rank's share and sums nothing. For the time that a reduction adds to the same step; it trains wrongly."""

    capabilities = Capabilities(name="unreduced", feature=Feature.ALL_REDUCE, replicas=True)

    def __init__(self) -> None:
        self._own = Single()

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Take the parameters; nothing is wrapped."""
        return self._own.prepare(modules, model, world, on_reduction)

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return an empty context."""
        return self._own.micro_batch(turn)

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Return the sum of this process."""
        return self._own.finish_gradients(numbers)

    def place_gradients(self) -> None:
        """Begin with every `.grad` at None."""
        self._own.place_gradients()

    def clear_gradients(self) -> None:
        """Set every `.grad` to None."""
        self._own.clear_gradients()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the numbers unchanged."""
        return numbers

    def close(self) -> None:
        """Remove the hooks."""
        self._own.close()


def without_reduction(micro_batch_size: int | Literal["auto"] | None, world: World) -> Hardware:
    """Return a strategy that runs this rank's share of a step without communication.

    The batch is cut and dealt as with communication, and divided by the count of all ranks. Weights and gradients are
    not sharded, regardless of the strategy of the step. A loss across samples still gathers the outputs of other ranks.
    """
    # A world created directly has no control plane, so it does not communicate.
    imagined = World(world.rank, world.size, world.device)
    return Hardware(micro_batch_size=micro_batch_size, strategy=Unreduced(), world=imagined)
