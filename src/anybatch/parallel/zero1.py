"""Replicas as under `all_reduce`, whose optimizer states are shared out over the ranks (ZeRO stage 1)."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anybatch.core.compatibility import Feature
from anybatch.parallel.all_reduce import AllReduce
from anybatch.parallel.replicas import Initial
from anybatch.parallel.sharded_update import ShardedUpdate
from anybatch.parallel.strategy import Capabilities, Prepared, ReductionObserver, Turn
from anybatch.parallel.world import World


class Zero1:
    """Gradients are summed by `AllReduce`; each rank updates the parameters it owns, and broadcasts them.

    An optimizer's state then takes 1 / ranks of its memory on each. It must update each parameter by itself, as all of
    `torch.optim` do. Not torch's `ZeroRedundancyOptimizer`: that makes an optimizer of its own out of a class and
    arguments, whereas here the user's stays, given as an instance or as a function, with its groups and its scheduler.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        initial: make replicas equal by broadcasting rank 0's values, or "verify" that they are.
    """

    capabilities = Capabilities(name="zero1", feature=Feature.ZERO1, replicas=True, tensor_parallel=True)

    def __init__(self, *, bucket_bytes: int = 25 * 2**20, initial: Initial = "broadcast") -> None:
        self._sums = AllReduce(bucket_bytes=bucket_bytes, initial=initial)

    def prepare(
        self, modules: nn.Module, model: object, world: World, on_reduction: ReductionObserver | None
    ) -> Prepared:
        """Make the replicas equal and put every gradient into a bucket."""
        prepared = self._sums.prepare(modules, model, world, on_reduction)
        return replace(prepared, shard_update=partial(ShardedUpdate, world=world))

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """As `AllReduce` does."""
        return self._sums.micro_batch(turn)

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """As `AllReduce` does: every rank has all gradients, which clipping and hooks need."""
        return self._sums.finish_gradients(numbers)

    def place_gradients(self) -> None:
        """Give every parameter its place in the buckets."""
        self._sums.place_gradients()

    def clear_gradients(self) -> None:
        """Set the buckets to zero."""
        self._sums.clear_gradients()

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """All-reduce a small tensor in the data group."""
        return self._sums.sum(numbers)

    def close(self) -> None:
        """Remove the hooks."""
        self._sums.close()
