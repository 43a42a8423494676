"""Data sets that can only be read from the beginning. Every rank reads the stream, then takes its share of each batch."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from anybatch.core.batch import Placement, Position
from anybatch.core.geometry import ceil_div
from anybatch.core.nested import Batch
from anybatch.data.ahead import Ahead
from anybatch.data.effective_batch import DatasetBatch
from anybatch.data.fetch import Collate, callers_randomness, collate_unit, pinned
from anybatch.data.order import Schedule
from anybatch.data.shards import ChunkKey, LaneReader, Shards, StreamSample, hide_worker, read_rounds, unpacked
from anybatch.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSource:
    """Effective batches of a stream: the next `effective_batch_size` samples, whatever that gives at the end.

    Resuming reads and drops the samples before the position.

    Args:
        shards: the stream; a whole one is a single shard.
        num_samples: length that the stream states for an epoch, used for the number of steps only; None if it does not.
        collate: makes a micro-batch of a list of samples.
        effective_batch_size: samples of one step.
        drop_last: leave out a last batch that is not full.
        seed: the seed of the run's data.
        start: where to begin.
        end_epoch: the first epoch that is not run; None if `steps` says where to stop.
        steps: number of steps from `start`; None if `end_epoch` says where to stop.
        num_workers: worker processes, at most one per shard; 0 reads in the calling process.
        pin_memory: whether to pin the units.
    """

    shards: Shards
    num_samples: int | None
    collate: Collate
    effective_batch_size: int
    drop_last: bool
    seed: int
    start: Position
    end_epoch: int | None
    steps: int | None
    num_workers: int
    pin_memory: bool

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch, if the stream states its length."""
        return self._stated_schedule().steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Number of steps from `start` to the end, if it is known."""
        if self.steps is not None:
            return self.steps
        return self._stated_schedule().steps_to_epoch(self.start, self.end_epoch or 0)

    def run(self) -> Iterator[DatasetBatch]:
        """Yield the effective batches from `start` on; workers stop when this generator does."""
        ahead = self._workers() if self.num_workers else None
        try:
            yield from itertools.islice(self._batches(ahead), self.steps)
        finally:
            if ahead is not None:
                ahead.close()

    def _stated_schedule(self) -> Schedule:
        if self.num_samples is None:
            message = "the number of steps is not known: the stream has no length. Give steps=, or a stream with __len__."
            raise TypeError(message)  # the type that list() and others expect of an object without length
        return Schedule(self.num_samples, self.effective_batch_size, self.drop_last)

    def _workers(self) -> Ahead[ChunkKey, bytes]:
        # Two chunks are under way in each lane: together about one effective batch.
        rounds = ceil_div(self.effective_batch_size, 2 * self.shards.num_shards)
        reader = LaneReader(self.shards, seed=self.seed, num_lanes=self.num_workers, rounds_per_chunk=rounds)
        return Ahead(reader, num_workers=self.num_workers, pin_memory=False, start_worker=hide_worker)

    def _batches(self, ahead: Ahead[ChunkKey, bytes] | None) -> Iterator[DatasetBatch]:
        for epoch in itertools.count(self.start.epoch):
            if epoch == self.end_epoch:
                return
            offset = self.start.sample_offset if epoch == self.start.epoch else 0
            yield from self._batches_of_epoch(Position(epoch, offset), self._samples(epoch, offset, ahead))

    def _batches_of_epoch(self, start: Position, stream: Iterator[StreamSample]) -> Iterator[DatasetBatch]:
        size = self.effective_batch_size
        self._skip(stream, start)
        held: list[StreamSample] = []
        position = start
        while True:
            with callers_randomness():
                held += itertools.islice(stream, size + 1 - len(held))  # one more: is this batch the last one?
            samples, held = held[:size], held[size:]
            if not samples or (self.drop_last and len(samples) < size):
                break
            end = Position(start.epoch, position.sample_offset + len(samples)) if held else Position(start.epoch + 1)
            yield DatasetBatch(
                sample_ids=tuple(map(itemgetter(0), samples)),
                seed=self.seed,
                start=position,
                end=end,
                feeder=_Feeder(list(map(itemgetter(1), samples)), self.collate, pin_memory=self.pin_memory),
            )
            position = end
        if position == Position(start.epoch):
            raise DataError(self._nothing_message(start.epoch, len(samples)))

    def _samples(self, epoch: int, offset: int, ahead: Ahead[ChunkKey, bytes] | None) -> Iterator[StreamSample]:
        """Return the samples of `epoch` in the order of the stream, those before `offset` possibly as None."""
        if ahead is not None:
            return self._samples_from_workers(epoch, offset, ahead)
        numbers = range(self.shards.num_shards)
        return itertools.chain.from_iterable(read_rounds(self.shards, numbers, seed=self.seed, epoch=epoch))

    def _samples_from_workers(
        self, epoch: int, offset: int, ahead: Ahead[ChunkKey, bytes]
    ) -> Iterator[StreamSample]:
        # At most n samples have an id below n, so that these are all before the offset and need not be sent here.
        num_shards, num_lanes = self.shards.num_shards, self.num_workers
        key_at = functools.partial(_chunk_key, epoch, num_lanes, offset - offset % num_shards)
        for first in itertools.count(0, num_lanes):
            rounds: list[StreamSample] = []
            for place in range(first, first + num_lanes):
                onward = functools.partial(map, key_at, itertools.count(place))
                rounds += unpacked(ahead.take(key_at(place), onward))
            if not rounds:
                return
            yield from sorted(rounds, key=itemgetter(0))

    def _skip(self, stream: Iterator[StreamSample], start: Position) -> None:
        with callers_randomness():
            num_skipped = sum(1 for _ in itertools.islice(stream, start.sample_offset))
        if num_skipped < start.sample_offset:
            message = (
                f"start.sample_offset={start.sample_offset} is larger than epoch {start.epoch} of the stream, which has "
                f"{num_skipped} samples. Resume with the stream that the position was saved with."
            )
            raise DataError(message)

    def _nothing_message(self, epoch: int, num_samples: int) -> str:
        if num_samples:
            return (
                f"drop_last=True leaves nothing: epoch {epoch} of the stream has {num_samples} samples, "
                f"effective_batch_size={self.effective_batch_size} needs {self.effective_batch_size}. "
                f"Use drop_last=False, or at most {num_samples}."
            )
        return (
            f"the stream is empty: epoch {epoch} yielded 0 samples, and a step needs at least 1. "
            "Its __iter__ must start afresh in every epoch."
        )


@dataclass(frozen=True, slots=True)
class _Feeder:
    """Collates the units of one batch, whose samples are read already."""

    samples: Sequence[Any]
    collate: Collate
    pin_memory: bool

    def __call__(self, batch: DatasetBatch, placement: Placement) -> Iterator[Batch]:
        for unit in placement.plan(batch.num_samples).shares[placement.rank]:
            ids, samples = batch.sample_ids[unit.start : unit.stop], list(self.samples[unit.start : unit.stop])
            with callers_randomness():
                collated = collate_unit(self.collate, samples, ids, seed=batch.seed, epoch=batch.epoch)
            yield pinned(collated) if self.pin_memory else collated


def _chunk_key(epoch: int, num_lanes: int, keep_from: int, place: int) -> ChunkKey:
    """Return what is read at `place` of the sequence that goes over the lanes again and again."""
    index, lane = divmod(place, num_lanes)
    return ChunkKey(epoch, lane, index, keep_from)
