"""Tools for measurements that repeat a step: settings, batches that are loaded once, and steps without reduction."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from anybatch.core.batch import EffectiveBatch, LaterUnits, Position, Positions, lengths_of, select
from anybatch.core.compatibility import Feature
from anybatch.core.tree import Batch
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.parallel.single import LocalSums
from anybatch.parallel.strategy import Capabilities
from anybatch.parallel.world import World


def spec_for_repeated_steps(train: TrainSpec) -> TrainSpec:
    """Return a copy of the spec for repeated and smaller steps: no scheduler, no check of the loss."""
    return dataclasses.replace(
        train,
        scheduler=None,  # the schedule would end
        check_loss=False,
        norms=train.norms or "keep",
        effective_batch_size=None,  # some steps have fewer samples
    )


class CachedBatch:
    """An effective batch that caches loaded micro-batches on the host."""

    def __init__(self, batch: EffectiveBatch) -> None:
        self._batch = batch
        self._loaded: tuple[Sequence[Positions], list[Batch]] | None = None
        self.sample_ids: Sequence[int] = batch.sample_ids
        self.seed: int = batch.seed
        self.end: Position = batch.end
        self.lengths = lengths_of(batch)
        self._layouts: dict[bool, CachedBatch] = {}

    def in_layout(self, *, packed: bool) -> "CachedBatch":
        """Return the batch padded or packed, if its collate function supports both; each is cached separately."""
        if packed not in self._layouts:
            batch: Any = self._batch  # a batch with `in_layout`
            self._layouts[packed] = CachedBatch(batch.in_layout(packed=packed))
        return self._layouts[packed]

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one micro-batch for each unit (its samples' positions); load only if the units have changed."""
        if self._loaded is None or self._loaded[0] != units:
            self._loaded = units, list(self._batch.feed(units, later_units))
        yield from self._loaded[1]


class BatchSubset:
    """A subset of the samples of an effective batch, as an effective batch."""

    def __init__(self, batch: EffectiveBatch, positions: Positions) -> None:
        self._batch = batch
        self._positions = positions
        self.sample_ids: Sequence[int] = select(batch.sample_ids, positions)
        self.seed: int = batch.seed
        self.end: Position = batch.end
        whole = lengths_of(batch)
        self.lengths = whole and dataclasses.replace(whole, tokens=select(whole.tokens, positions))

    def in_layout(self, *, packed: bool) -> "BatchSubset":
        """Return the samples padded or packed, if their collate function supports both."""
        batch: Any = self._batch  # a batch with `in_layout`
        return BatchSubset(batch.in_layout(packed=packed), self._positions)

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one micro-batch for each unit."""
        return self._batch.feed([select(self._positions, unit) for unit in units], later_units)


class Unreduced(LocalSums):
    """Runs a rank's share without summing over ranks, to measure the time of the reduction; updates are wrong."""

    capabilities = Capabilities(name="unreduced", feature=Feature.ALL_REDUCE, replicas=True)


def without_reduction(micro_batch_size: int | Literal["auto"] | None, world: World) -> Hardware:
    """Return a strategy that runs this rank's share of a step without communication.

    The batch is split as with communication, and losses are divided by the number of items on all ranks. Weights and
    gradients are not sharded, for any strategy. With `ab.joint`, outputs of other ranks are still gathered.
    """
    # A world created directly has no process group for counts and errors, so it does not communicate.
    local_world = World(world.rank, world.size, world.device)
    return Hardware(micro_batch_size=micro_batch_size, strategy=Unreduced(), world=local_world)
