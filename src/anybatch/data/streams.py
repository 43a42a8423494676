"""Data sets that can only be read from the beginning: each rank reads the stream and takes its share of each batch."""

import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader

from anybatch.core.batch import LaterUnits, Position, Positions, taken
from anybatch.core.batch_ramp import BatchRamp
from anybatch.core.geometry import ceil_div
from anybatch.core.token_budget import SampleLengths
from anybatch.core.tree import Batch, pick_samples
from anybatch.data.effective_batch import StepSamples
from anybatch.data.fetch import OverEffectiveBatch, checked_rows, collate_unit, in_layout, only_collates, pinned
from anybatch.data.keyed_loading import KeyedLoading
from anybatch.data.lengths import KnownLengths
from anybatch.data.options import BatchOptions, RunRange
from anybatch.data.order import SampleSchedule
from anybatch.data.prefetch import Prefetcher
from anybatch.data.random_state import preserved_random_state
from anybatch.data.sample_loaders import check_loader
from anybatch.data.serialization import unpacked
from anybatch.data.shards import ChunkKey, LaneReader, Shards, StreamSample, hide_worker, read_rounds
from anybatch.errors import DataError


class StreamSource:
    """Effective batches of a stream: the next `effective_batch_size` samples, and the remainder at the end.

    Resuming reads and drops the samples before the position.

    Args:
        dataset: the stream as passed by the user.
        shards: the stream as shards; an unsharded one is a single shard.
        num_samples: the stream's own length of an epoch, used for the number of steps only; None if unknown.
        request: the arguments of `batches`.

    Raises:
        DataError: a shuffled stream, or more workers than shards.
    """

    def __init__(self, dataset: object, shards: Shards, num_samples: int | None, request: BatchOptions) -> None:
        self._dataset = dataset
        self._shards = shards
        self._num_samples = num_samples
        self._request = request
        _check_request(request, shards.num_shards)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch, if the stream has a length."""
        return self._stated_schedule().steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Number of steps from `start` to the end, if known."""
        span = self._request.span
        if span.steps is not None:
            return span.steps
        return self._stated_schedule().num_steps(span.start, span.end_epoch, span.steps)

    def open(self) -> "OpenStream":
        """Return the source with its own workers; refuse a loader that cannot be read from its beginning."""
        if isinstance(self._dataset, DataLoader):
            check_loader(self._dataset, num_workers=self._request.num_workers)
        return OpenStream(self._dataset, self._shards, self._request)

    def _stated_schedule(self) -> SampleSchedule:
        if self._num_samples is None:
            message = "the number of steps is not known: the stream has no length. Give steps=, or add a __len__."
            raise TypeError(message)  # list() and others expect a TypeError
        _check_ramp(self._request.effective_batch_size, Position(1), self._num_samples)
        return SampleSchedule(self._num_samples, self._request.effective_batch_size, self._request.drop_last)


class OpenStream:
    """A stream that is being read. Ids are positions in it, so they do not identify its order."""

    num_samples = None
    subset_digest = None

    def __init__(self, dataset: object, shards: Shards, request: BatchOptions) -> None:
        self.dataset = dataset
        self._shards = shards
        self._request = request
        self._ahead = self._workers() if request.num_workers else None
        self._here = KeyedLoading(draws_nothing=only_collates(request.collate))
        self._known = None if request.lengths is None else KnownLengths(request.lengths, request.collate, None)

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step of a span."""
        return itertools.islice(self._steps_of_epochs(span.start, span.end_epoch), span.steps)

    def digest_before(self, position: Position) -> None:
        """Return None: a stream has no digest, because earlier samples are not read again."""

    def sampled_order(self, epoch: int) -> None:
        """Return None: a stream has no sampler."""

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Do nothing: a stream has no sampler."""

    def close(self) -> None:
        """Shut the workers down."""
        if self._ahead is not None:
            self._ahead.close()

    def _workers(self) -> Prefetcher[ChunkKey, bytes]:
        num_lanes, num_shards = self._request.num_workers, self._shards.num_shards
        rounds = ceil_div(max(self._request.sizes), 2 * num_shards)  # two in flight: one effective batch
        reader = LaneReader(self._shards, seed=self._request.seed, num_lanes=num_lanes, rounds_per_chunk=rounds)
        # Not pinned here: samples arrive as bytes, and only the micro-batches made of them are pinned.
        return Prefetcher(reader, num_workers=num_lanes, pin_memory=False, start_worker=hide_worker)

    def _steps_of_epochs(self, start: Position, end_epoch: int | None) -> Iterator[StepSamples]:
        # `!=` and not `<`: the end is None for a given number of steps.
        while start.epoch != end_epoch:
            ahead = self._ahead
            stream = self._samples_here(start) if ahead is None else self._samples_from_workers(start, ahead)
            _skip(stream, start)
            num_samples = yield from self._steps_of_epoch(stream, start)
            start = Position(start.epoch + 1)
            if start.epoch != end_epoch:
                _check_ramp(self._request.effective_batch_size, start, num_samples)

    def _finder(self, samples: Sequence[Any]) -> Callable[[Sequence[int]], SampleLengths | None]:
        known = self._known
        return lambda ids: None if known is None else known.of(ids, samples)

    def _samples_here(self, start: Position) -> Iterator[StreamSample]:
        numbers = range(self._shards.num_shards)
        rounds = read_rounds(self._shards, numbers, seed=self._request.seed, epoch=start.epoch)
        return itertools.chain.from_iterable(rounds)

    def _samples_from_workers(self, start: Position, ahead: Prefetcher[ChunkKey, bytes]) -> Iterator[StreamSample]:
        """Yield the samples of an epoch from its first one on; samples before `start` may be None."""
        num_lanes, num_shards = self._request.num_workers, self._shards.num_shards
        # At most n samples have an id below n: all of them precede the start and stay in the worker.
        keep_from = start.sample_offset - start.sample_offset % num_shards
        key_at = functools.partial(_chunk_key, start.epoch, num_lanes, keep_from)
        for first in itertools.count(0, num_lanes):
            samples: list[StreamSample] = []
            for place in range(first, first + num_lanes):
                onward = functools.partial(map, key_at, itertools.count(place))
                samples += unpacked(ahead.take(key_at(place), onward))
            if not samples:
                return
            # Lanes read different shards of the same rounds; sorted by id they are in the order of a single reader.
            yield from sorted(samples, key=itemgetter(0))

    def _steps_of_epoch(self, stream: Iterator[StreamSample], start: Position) -> Generator[StepSamples, None, int]:
        """Yield the steps of an epoch from `start` on; return its end, in samples."""
        request, position = self._request, start
        sizes = request.effective_batch_size
        read: list[StreamSample] = []
        while True:
            size = _size_at(sizes, position.epoch, position.sample_offset)
            # Minimum samples of the next step.
            least = _size_at(sizes, position.epoch, position.sample_offset + size) if request.drop_last else 1
            with preserved_random_state():
                read += itertools.islice(stream, max(0, size + least - len(read)))  # is this batch the last one?
            samples, read = read[:size], read[size:]
            if not samples or (request.drop_last and len(samples) < size):
                break
            stop = position.sample_offset + len(samples)
            end = Position(start.epoch + 1) if len(read) < least else Position(start.epoch, stop)
            feeder = _Feeder([sample for _, sample in samples], request, self._here)
            ids = tuple(sample_id for sample_id, _ in samples)
            yield StepSamples(
                sample_ids=ids,
                start=position,
                end=end,
                feeder=feeder,
                find_lengths=self._finder(feeder.samples),
            )
            if end.epoch > start.epoch:
                return stop
            position = end
        # Without an error, a run of `steps` would restart the empty epoch forever.
        if position == Position(start.epoch):
            raise DataError(_nothing_to_yield(start.epoch, len(samples), size))
        return position.sample_offset


@dataclass(frozen=True, slots=True)
class _Feeder:
    """Collates the units of one batch whose samples are already loaded."""

    samples: Sequence[Any]
    request: BatchOptions
    here: KeyedLoading

    def __call__(
        self,
        batch: StepSamples,
        units: Sequence[Positions],
        later_units: LaterUnits | None,  # noqa: ARG002 (a stream cannot be predicted)
    ) -> Iterator[Batch]:
        collate = self.request.collate
        if isinstance(collate, OverEffectiveBatch):
            whole = self._collated(batch, range(len(self.samples))) if units else None
            yield from (pick_samples(whole, positions) for positions in units)
            return
        for positions in units:
            yield self._collated(batch, positions)

    def _collated(self, batch: StepSamples, positions: Positions) -> Batch:
        request = self.request
        ids, samples = taken(batch.sample_ids, positions), list(taken(self.samples, positions))
        key = (request.seed, batch.start.epoch)
        collate = in_layout(request.collate, packed=batch.packed)
        collated = self.here.run(lambda seed: collate_unit(collate, samples, ids, key=key, seed=seed))
        collated = checked_rows(collated, len(samples), collate)
        return pinned(collated) if request.pin_memory else collated


def _size_at(sizes: int | BatchRamp, epoch: int, sample_offset: int) -> int:
    """Return the effective batch size of a step; later epochs are in a ramp's last stage, see `_check_ramp`."""
    if isinstance(sizes, int):
        return sizes
    return sizes.sizes[-1] if epoch else sizes.at(sample_offset)


def _check_ramp(sizes: int | BatchRamp, start: Position, num_samples: int) -> None:
    """Refuse to begin the second epoch in the middle of a ramp.

    A resumed run does not have the number of samples of the first epoch, and so could not determine its stage.
    """
    if isinstance(sizes, BatchRamp) and start.epoch == 1 and num_samples < sizes.num_samples:
        message = (
            f"the ramp ({sizes}) begins its last stage after {sizes.num_samples:,} samples, and the first epoch of the "
            f"stream has {num_samples:,}. Over a stream, a ramp has to reach its last stage in the first epoch."
        )
        raise DataError(message)


def _chunk_key(epoch: int, num_lanes: int, keep_from: int, place: int) -> ChunkKey:
    """Return the key of chunk `place` in the sequence that cycles over the lanes."""
    index, lane = divmod(place, num_lanes)
    return ChunkKey(epoch, lane, index, keep_from)


def _skip(stream: Iterator[StreamSample], start: Position) -> None:
    # Reading seeds the caller's global generators.
    with preserved_random_state():
        num_skipped = sum(1 for _ in itertools.islice(stream, start.sample_offset))
    if num_skipped < start.sample_offset:
        message = (
            f"start.sample_offset={start.sample_offset} is larger than epoch {start.epoch} of the stream, which has "
            f"{num_skipped} samples. Resume with the stream that the position was saved with."
        )
        raise DataError(message)


def _nothing_to_yield(epoch: int, num_samples: int, effective_batch_size: int) -> str:
    if num_samples:
        return (
            f"drop_last=True leaves nothing: epoch {epoch} of the stream has {num_samples} samples, "
            f"{effective_batch_size=} needs {effective_batch_size}. Use drop_last=False, or at most {num_samples}."
        )
    return (
        f"the stream is empty: epoch {epoch} yielded 0 samples, and a step needs at least 1. "
        "Its __iter__ must restart in every epoch."
    )


def _check_request(request: BatchOptions, num_shards: int) -> None:
    if request.shuffle:
        message = (
            "shuffle=True needs a data set with an index, and this one is a stream, which comes in its own order. "
            "Pass shuffle=False, and shuffle inside the data set (its set_epoch(epoch) is called if it has one)."
        )
        raise DataError(message)
    if request.num_workers > num_shards == 1:
        message = (
            f"num_workers={request.num_workers} would each read the whole stream and yield every sample "
            f"{request.num_workers} times. Use num_workers=1, or divide the stream with ab.Shards."
        )
        raise DataError(message)
    if request.num_workers > num_shards:
        message = (
            f"num_workers={request.num_workers} cannot share {num_shards} shards: a shard is read by one worker. "
            f"Use at most num_workers={num_shards}, or more shards."
        )
        raise DataError(message)
