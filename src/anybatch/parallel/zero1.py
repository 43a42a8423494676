"""Replicas as under `all_reduce`, with optimizer states sharded over the ranks (ZeRO stage 1)."""

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

    Each rank then holds 1 / ranks of the optimizer's state. The optimizer must update each parameter independently, as
    all of `torch.optim` do. torch's `ZeroRedundancyOptimizer` is not used: it constructs a new optimizer from a class
    and arguments, but here the user's optimizer is kept, given as an instance or as a function, with its groups and
    scheduler.

    Args:
        bucket_bytes: gradient bytes per all-reduce.
        initial: "broadcast" makes replicas equal with rank 0's values; "verify" raises if they differ.
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
        """Like `AllReduce`."""
        return self._sums.micro_batch(turn)

    def finish_gradients(
        self, numbers: Float[Tensor, " numbers"]
    ) -> tuple[list[torch.Tensor | None], Float[Tensor, " numbers"]]:
        """Like `AllReduce`: every rank has all gradients, which clipping and hooks need."""
        return self._sums.finish_gradients(numbers)

    def place_gradients(self) -> None:
        """Make every `.grad` a view of the buckets."""
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
