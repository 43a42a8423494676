"""Data sets that can only be read from the beginning: each rank reads the stream and takes its share of each batch."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from anybatch.core.batch import LaterUnits, Position, Positions, taken
from anybatch.core.geometry import ceil_div
from anybatch.core.randomness import order_seed, sample_seed
from anybatch.core.schedules import BatchRamp
from anybatch.core.token_budget import SampleLengths
from anybatch.core.torch_internals import hides_worker
from anybatch.core.tree import Batch, pick_samples
from anybatch.data.collate import KnownLengths
from anybatch.data.effective_batch import StepSamples
from anybatch.data.loading import OverEffectiveBatch, checked_rows, collate_unit, in_layout, only_collates, pinned
from anybatch.data.options import BatchOptions, RunRange, SampleSchedule
from anybatch.data.prefetch import Prefetcher, packed, unpacked
from anybatch.data.random_state import KeyedLoading, preserved_random_state, seed_generators
from anybatch.errors import DataError


def yields_samples(loader: "DataLoader[Any]") -> bool:
    """Whether a loader yields samples, not batches: it was made with `batch_size=None` and no batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is None


def check_loader(loader: "DataLoader[Any]", *, num_workers: int) -> None:
    """Raise a `DataError` unless a loader yields all of its samples from the beginning, the same on every rank."""
    if isinstance(loader.sampler, DistributedSampler):
        message = (
            "the loader has a DistributedSampler, and ab.batches gives each rank its share of every batch itself, so "
            "samples would be lost. Leave it out."
        )
        raise DataError(message, code="distributed_sampler")
    if getattr(loader.sampler, "generator", None) is not None or loader.generator is not None:
        message = (
            "the loader draws its order from its own generator, whose state a resumed run does not have; torchdata's "
            "loaders always do so if they shuffle. Pass the data set itself, which ab.batches shuffles in each epoch "
            "by its seed, or leave the generator, or shuffle=True, out."
        )
        raise DataError(message, code="own_generator")
    if num_workers and loader.num_workers:
        message = (
            f"{num_workers=} would read a loader with {loader.num_workers} workers in workers, which cannot start any. "
            "Leave one of them out."
        )
        raise DataError(message, code="workers_in_workers")
    # torchdata's loader would begin at its saved state, and the samples before the run's position would be dropped
    # twice.
    if getattr(loader, "next_iter_state", None) is not None:
        message = (
            "the loader has been given a state (load_state_dict), but ab.batches continues at the "
            "engine's position. Leave it out: engine.load restores the position in samples, at any world size."
        )
        raise DataError(message, code="loader_with_state")


StreamSample = tuple[int, Any]
"""A sample's id (round x number of shards + shard: with one shard its position) and the sample."""


class Shards:
    """A stream in a fixed number of shards, read round robin: one sample of each per round, skipping ended shards.

    The order depends on the shards alone, so that any number of workers up to `num_shards` can share the reading. In
    each epoch every shard is iterated again, after a call of its `set_epoch(epoch)` if it has that method. Shards must
    not divide themselves further by worker or by rank: every rank reads all of them and takes its share of each batch.

    The plain loop, for shards of equal length: `for row in zip(*parts): yield from row`.

    Args:
        parts: a sequence of iterables, or a function that returns the iterable of shard 0, 1, ... `num_shards - 1`. It
            is copied into the workers, so it must be picklable unless processes are forked.
        num_shards: the number of shards, if and only if `parts` is a function.

    Raises:
        DataError: no shard, a shard that can be read only once, or `num_shards` missing or superfluous.
    """

    __slots__ = ("_parts", "num_shards")

    def __init__(
        self, parts: "Sequence[Iterable[Any]] | Callable[[int], Iterable[Any]]", *, num_shards: int | None = None
    ) -> None:
        self._parts = parts
        self.num_shards = _number_of_shards(parts, num_shards)

    def open(self, number: int, epoch: int) -> Iterator[Any]:
        """Return an iterator over shard `number` from its first sample on, after its `set_epoch(epoch)`, if any."""
        part = self._parts(number) if callable(self._parts) else self._parts[number]
        set_epoch = getattr(part, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        return iter(part)


def check_readable(part: object, name: str) -> None:
    """Raise a `DataError` unless `part` can be iterated more than once."""
    # A generator is exhausted after one epoch; later epochs would be empty without an error.
    if isinstance(part, Generator):
        message = (
            f"{name} is a generator, which can be read only once. Pass an object whose __iter__ restarts "
            "(such as a torch IterableDataset), or ab.Shards(generator_function, num_shards=1)."
        )
        raise DataError(message, code="read_only_once")
    if isinstance(part, str) or not isinstance(part, Iterable):
        message = (
            f"{name} is of type {type(part).__name__}; its samples can be neither indexed nor iterated. "
            "Pass a data set with __getitem__ and __len__, or a stream: an object with __iter__."
        )
        raise DataError(message, code="not_iterable")


def read_rounds(shards: Shards, numbers: Sequence[int], *, seed: int, epoch: int) -> Iterator[list[StreamSample]]:
    """Yield, round by round, the next sample of each of the shards `numbers` that has one, until all have ended.

    The shards' draws from the global generators are keyed by (seed, epoch, sample id), so that all ranks and any number
    of workers read the same stream. The generators' state is not restored.
    """
    parts = {}
    for number in numbers:
        # A shard may draw numbers when it is opened, to shuffle its files, say.
        seed_generators(order_seed(order_seed(seed, number), epoch))
        parts[number] = shards.open(number, epoch)
    # The id of a sample is round x number of shards + shard: independent of the number of readers.
    for first_id in itertools.count(0, shards.num_shards):
        samples = []
        # A copy, because ended shards are removed on the way.
        for number, part in list(parts.items()):
            seed_generators(sample_seed(seed, epoch, first_id + number))
            try:
                samples.append((first_id + number, next(part)))
            except StopIteration:
                del parts[number]
            except Exception as error:
                error.add_note(f"anybatch: while reading sample {first_id + number} of the stream, {epoch=}.")
                raise
        if not samples:
            return
        yield samples


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Chunk `index` of worker number `lane` in `epoch`. Samples with ids below `keep_from` are not sent."""

    epoch: int
    lane: int
    index: int
    keep_from: int


class LaneReader:
    """Reads every `num_lanes`-th shard, in chunks of rounds. Lives in a worker and remembers its position."""

    def __init__(self, shards: Shards, *, seed: int, num_lanes: int, rounds_per_chunk: int) -> None:
        self._shards = shards
        self._seed = seed
        self._num_lanes = num_lanes
        self._rounds_per_chunk = rounds_per_chunk
        self._due: ChunkKey | None = None
        self._rounds: Iterator[list[StreamSample]] = iter(())

    def __call__(self, key: ChunkKey) -> bytes:
        """Return the chunk, for `unpacked`; empty if the lane's shards have ended."""
        if key != self._due:
            numbers = range(key.lane, self._shards.num_shards, self._num_lanes)
            self._rounds = read_rounds(self._shards, numbers, seed=self._seed, epoch=key.epoch)
            # A stream has no index: read and drop the rounds before the chunk.
            deque(itertools.islice(self._rounds, key.index * self._rounds_per_chunk), maxlen=0)
        self._due = None  # if reading fails, the next call starts over
        rounds = itertools.islice(self._rounds, self._rounds_per_chunk)
        # Samples before the run's position are read but not sent: only their ids count.
        chunk = [(i, sample if i >= key.keep_from else None) for round_ in rounds for i, sample in round_]
        self._due = replace(key, index=key.index + 1)
        return packed(chunk)


def hide_worker(worker_id: int) -> None:
    """Make this worker look like the calling process to data sets that would divide themselves among workers.

    The shards are divided already; a shard that divides itself again would lose samples.

    Raises:
        DataError: this version of torch does not allow it.
    """
    if not hides_worker():
        message = f"worker {worker_id} cannot be hidden from data sets in torch {torch.__version__}. Use num_workers=0."
        raise DataError(message)


def _number_of_shards(parts: "Sequence[Iterable[Any]] | Callable[[int], Iterable[Any]]", num_shards: int | None) -> int:
    if callable(parts):
        if num_shards is None or num_shards < 1:
            message = f"num_shards={num_shards!r} must be at least 1 for shards that come from a function."
            raise DataError(message, code="num_shards")
        return num_shards
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        message = (
            f"the shards are of type {type(parts).__name__}. Pass a list of iterables, or a function that returns the "
            "iterable of a shard, with num_shards."
        )
        raise DataError(message, code="not_a_list_of_shards")
    if num_shards is not None:
        message = f"num_shards={num_shards!r} is for a function only; leave it out for a list of {len(parts)} shards."
        raise DataError(message, code="num_shards")
    if not parts:
        message = "Shards([]) has 0 shards and needs at least 1. Check the list of files or parts."
        raise DataError(message, code="no_shards")
    for number, part in enumerate(parts):
        check_readable(part, f"shard {number}")
    return len(parts)


class StreamSource:
    """Effective batches of a stream: the next `effective_batch_size` samples, and the remainder at the end.

    Resuming reads and drops the samples before the position.

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
        return SampleSchedule(self._num_samples, self._request)


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
            raise DataError(_nothing_to_yield(start.epoch, len(samples), size), code="no_full_batch")
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
        raise DataError(message, code="stage_never_begins")


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
        raise DataError(message, code="start_beyond_epoch")


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
        raise DataError(message, code="shuffled_stream")
    if request.num_workers > num_shards == 1:
        message = (
            f"num_workers={request.num_workers} would each read the whole stream and yield every sample "
            f"{request.num_workers} times. Use num_workers=1, or divide the stream with ab.Shards."
        )
        raise DataError(message, code="too_many_workers")
    if request.num_workers > num_shards:
        message = (
            f"num_workers={request.num_workers} cannot share {num_shards} shards: a shard is read by one worker. "
            f"Use at most num_workers={num_shards}, or more shards."
        )
        raise DataError(message, code="too_many_workers")
