"""What steps are made of that are made over and over to measure them: how they train, and batches loaded once."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from anybatch.core.batch import EffectiveBatch, LaterUnits, Position, Positions, lengths_of, taken
from anybatch.core.tree import Batch
from anybatch.engine.spec import TrainSpec


def spec_for_repeated_steps(train: TrainSpec) -> TrainSpec:
    """Return a copy for repeated and shorter steps: no scheduler, no check of the loss."""
    return dataclasses.replace(
        train,
        scheduler=None,  # it would reach its end
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
        """Return the batch padded or packed, where its collate function can do both; each is cached separately."""
        if packed not in self._layouts:
            batch: Any = self._batch  # which has a choice of layouts
            self._layouts[packed] = CachedBatch(batch.in_layout(packed=packed))
        return self._layouts[packed]

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield the micro-batches of a cut, loaded once as long as the cut stays."""
        # Another micro-batch size cuts the batch elsewhere.
        if self._loaded is None or self._loaded[0] != units:
            self._loaded = units, list(self._batch.feed(units, later_units))
        yield from self._loaded[1]


class BatchSubset:
    """A subset of the samples of an effective batch, as an effective batch."""

    def __init__(self, batch: EffectiveBatch, positions: Positions) -> None:
        self._batch = batch
        self._positions = positions
        self.sample_ids: Sequence[int] = taken(batch.sample_ids, positions)
        self.seed: int = batch.seed
        self.end: Position = batch.end
        whole = lengths_of(batch)
        self.lengths = whole and dataclasses.replace(whole, tokens=taken(whole.tokens, positions))

    def in_layout(self, *, packed: bool) -> "BatchSubset":
        """Return the samples padded or packed, where their collate function can do both."""
        batch: Any = self._batch  # which has a choice of layouts
        return BatchSubset(batch.in_layout(packed=packed), self._positions)

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one micro-batch for each unit."""
        return self._batch.feed([taken(self._positions, unit) for unit in units], later_units)
