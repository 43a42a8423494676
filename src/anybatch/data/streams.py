"""Data sets without an index (streams): each rank reads the whole stream, and uses its share of each batch."""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from anybatch.core.batch import LaterUnits, Position
from anybatch.core.geometry import ceil_div
from anybatch.core.randomness import order_seed, sample_seed
from anybatch.core.schedules import BatchRamp, sizes_of
from anybatch.core.torch_internals import hide_worker
from anybatch.core.tree import Batch
from anybatch.data.collate import KnownLengths
from anybatch.data.effective_batch import OpenSource, StepSamples
from anybatch.data.indexed import SampleSchedule
from anybatch.data.loading import UnitKey, UnitLoader, checked_rows, pinned
from anybatch.data.options import BatchOptions, RunRange, check_sampler_order
from anybatch.data.prefetch import loader_of, packed, picklable_errors, unpacked
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.errors import DataError


def yields_samples(loader: "DataLoader[Any]") -> bool:
    """Whether a loader yields samples, not batches: it was made with `batch_size=None` and no batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is None


def check_loader(loader: "DataLoader[Any]", *, num_workers: int) -> None:
    """Raise a `DataError` unless a loader yields all of its samples from the beginning, the same on every rank."""
    check_sampler_order(loader.sampler, loader.generator)
    if num_workers and loader.num_workers:
        message = (
            f"{num_workers=} would run a loader with {loader.num_workers} workers in worker processes, which cannot "
            "start workers. Set one of the two to 0."
        )
        raise DataError(message, code="workers_in_workers")
    # torchdata's loader would begin at its saved state, and the samples before the run's position would be dropped
    # twice.
    if getattr(loader, "next_iter_state", None) is not None:
        message = (
            "load_state_dict was called on the loader, but ab.batches continues at the engine's position. Do not "
            "call it: engine.load restores the position in samples, at any world size."
        )
        raise DataError(message, code="loader_with_state")


StreamSample = tuple[int, Any]
"""A sample's id and the sample. The id is round x number of shards + shard; with one shard it is the position."""


class Shards:
    """A stream in a fixed number of shards, read round robin: each round yields the next sample of every shard.

    A shard that has ended is skipped. The order does not depend on the number of workers, which is at most
    `num_shards`. Every epoch iterates over each shard again, and first calls its `set_epoch(epoch)` if it has that
    method. Shards must not divide their samples by worker or by rank: every rank reads all shards and uses its share of
    each batch.

    In plain Python, for shards of equal length: `for row in zip(*parts): yield from row`.

    Args:
        parts: a sequence of iterables, or a function that returns the iterable of shard 0, 1, ... `num_shards - 1`.
            Workers get a copy, so `parts` must be picklable unless worker processes are forked.
        num_shards: the number of shards if `parts` is a function; else omit it.

    Raises:
        DataError: there are no shards, a shard can be read only once, or `num_shards` is missing or not needed.
    """

    __slots__ = ("_parts", "num_shards")

    def __init__(
        self, parts: "Sequence[Iterable[Any]] | Callable[[int], Iterable[Any]]", *, num_shards: int | None = None
    ) -> None:
        self._parts = parts
        self.num_shards = _number_of_shards(parts, num_shards)

    def open(self, number: int, epoch: int) -> Iterator[Any]:
        """Call `set_epoch(epoch)` of shard `number`, if it has that method, and return an iterator over the shard."""
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
    """Yield for each round the next samples of the shards `numbers`, until all shards have ended.

    The global generators are seeded from (seed, epoch, sample id) before each sample, so that all ranks and any number
    of workers read the same stream. The state of the generators is not restored.
    """
    parts = {}
    for number in numbers:
        # A shard may draw random numbers when it is opened, for example to shuffle its files.
        seed_generators(order_seed(order_seed(seed, number), epoch))
        parts[number] = shards.open(number, epoch)
    for first_id in itertools.count(0, shards.num_shards):
        samples = []
        # Iterate over a copy, because ended shards are removed in the loop.
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


@dataclass(frozen=True)
class _ShardReader(IterableDataset[tuple[int, bytes]]):
    """Reads every n-th shard of an epoch in one of n workers, and yields numbered chunks of several rounds.

    Samples with ids below `keep_from` are read, but None is sent in their place.
    """

    shards: Shards
    seed: int
    epoch: int
    rounds_per_chunk: int
    keep_from: int

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        worker = get_worker_info()
        assert worker is not None
        # A shard that divides itself over workers would lose samples, because the shards are already divided.
        if not hide_worker():
            message = f"torch {torch.__version__} cannot hide a worker process from shards. Use num_workers=0."
            raise DataError(message)
        numbers = range(worker.id, self.shards.num_shards, worker.num_workers)
        with picklable_errors():
            rounds = read_rounds(self.shards, numbers, seed=self.seed, epoch=self.epoch)
            for index in itertools.count():
                samples = itertools.chain.from_iterable(itertools.islice(rounds, self.rounds_per_chunk))
                chunk = [(number, sample if number >= self.keep_from else None) for number, sample in samples]
                if not chunk:
                    return
                yield index, packed(chunk)


def _number_of_shards(parts: "Sequence[Iterable[Any]] | Callable[[int], Iterable[Any]]", num_shards: int | None) -> int:
    if callable(parts):
        if num_shards is None or num_shards < 1:
            message = f"num_shards={num_shards!r} must be at least 1 for shards that come from a function."
            raise DataError(message, code="num_shards")
        return num_shards
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        message = (
            f"the shards are of type {type(parts).__name__}, but must be a list of iterables, or a function. Pass a "
            "function that returns the iterable of a shard together with num_shards."
        )
        raise DataError(message, code="not_a_list_of_shards")
    if num_shards is not None:
        message = f"num_shards={num_shards!r} is only for a function. Leave it out for a list of {len(parts)} shards."
        raise DataError(message, code="num_shards")
    if not parts:
        message = "Shards([]) has 0 shards and needs at least 1. Check the list of files or parts."
        raise DataError(message, code="no_shards")
    for number, part in enumerate(parts):
        check_readable(part, f"shard {number}")
    return len(parts)


def stated_schedule(num_samples: int | None, options: BatchOptions) -> SampleSchedule:
    """Return the schedule of a stream; raise a `TypeError` if the stream has no length."""
    if num_samples is None:
        message = "the number of steps is unknown, because the stream has no length. Pass steps=, or add a __len__."
        raise TypeError(message)  # list() ignores a TypeError from __len__, but no other error
    _check_ramp(options.effective_batch_size, Position(1), num_samples)
    return SampleSchedule(num_samples, options)


class OpenStream(OpenSource):
    """The reader of a stream: each step takes the next `effective_batch_size` samples, and the last step the remainder.

    Sample ids number the samples as they are read, so equal ids do not prove an equal order. Resuming reads the
    samples before the position and drops them.

    Raises:
        DataError: the stream is a loader that cannot be read from its beginning.
    """

    def __init__(self, dataset: object, shards: Shards, options: BatchOptions, lengths: KnownLengths | None) -> None:
        if isinstance(dataset, DataLoader):
            check_loader(dataset, num_workers=options.num_workers)
        super().__init__(dataset, options, lengths)
        self._shards = shards
        self._samples: Generator[StreamSample, None, None] | None = None

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step in a range."""
        return itertools.islice(self._steps_of_epochs(span.start, span.end_epoch), span.steps)

    def close(self) -> None:
        """Shut the workers down."""
        if self._samples is not None:
            self._samples.close()

    def _steps_of_epochs(self, start: Position, end_epoch: int | None) -> Iterator[StepSamples]:
        # `!=` instead of `<`, because `end_epoch` is None for a given number of steps.
        while start.epoch != end_epoch:
            self._samples = self._read(start)
            _skip(self._samples, start)
            num_samples = yield from self._steps_of_epoch(self._samples, start)
            start = Position(start.epoch + 1)
            if start.epoch != end_epoch:
                _check_ramp(self.options.effective_batch_size, start, num_samples)

    def _read(self, start: Position) -> Generator[StreamSample, None, None]:
        """Yield all samples of an epoch; with workers, None may replace samples before `start`."""
        options, num_shards = self.options, self._shards.num_shards
        if not options.num_workers:
            for samples in read_rounds(self._shards, range(num_shards), seed=options.seed, epoch=start.epoch):
                yield from samples
            return
        reader = _ShardReader(
            self._shards,
            options.seed,
            start.epoch,
            rounds_per_chunk=ceil_div(
                max(sizes_of(options.effective_batch_size)), 2 * num_shards
            ),  # two chunks are in flight, together about one effective batch
            # Samples with ids below this come before the start, since ids are given in rounds over all shards.
            keep_from=start.sample_offset - start.sample_offset % num_shards,
        )
        try:
            # A loader yields the chunks of its workers in turn. Chunks with the same index have different shards of the
            # same rounds: sorted by id, their samples are in the order of a single reader.
            for _, chunks in itertools.groupby(loader_of(reader, options.num_workers), key=itemgetter(0)):
                samples = [sample for _, chunk in chunks for sample in unpacked(chunk)]
                yield from sorted(samples, key=itemgetter(0))
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 (raised again)
            raise error.with_traceback(None)  # noqa: B904 (its frames would keep the workers alive)

    def _steps_of_epoch(self, stream: Iterator[StreamSample], start: Position) -> Generator[StepSamples, None, int]:
        """Yield the steps of an epoch from `start` on; return the offset of its end, in samples."""
        options, position = self.options, start
        sizes = options.effective_batch_size
        read: list[StreamSample] = []
        while True:
            size = _size_at(sizes, position.epoch, position.sample_offset)
            # Also read the minimum number of samples for another step, to find out whether this step is the last one.
            minimum = _size_at(sizes, position.epoch, position.sample_offset + size) if options.drop_last else 1
            with preserved_random_state():
                read += itertools.islice(stream, max(0, size + minimum - len(read)))
            samples, read = read[:size], read[size:]
            if not samples or (options.drop_last and len(samples) < size):
                break
            stop = position.sample_offset + len(samples)
            end = Position(start.epoch + 1) if len(read) < minimum else Position(start.epoch, stop)
            loaded = dict(samples)
            yield StepSamples(sample_ids=tuple(loaded), start=position, end=end, source=self, loaded=loaded)
            if end.epoch > start.epoch:
                return stop
            position = end
        # Without this error, a run of `steps` would restart the empty epoch forever.
        if position == Position(start.epoch):
            message = (
                f"epoch {start.epoch} of the stream yielded {len(samples)} samples, but a step needs "
                f"{size if options.drop_last else 1}. Let its __iter__ restart in every epoch, or use "
                "drop_last=False."
            )
            raise DataError(message, code="no_full_batch")
        return position.sample_offset

    def load(
        self,
        key: UnitKey,
        batch: StepSamples,
        keys: Sequence[UnitKey],  # noqa: ARG002 (samples of a stream are not prefetched by key)
        later_units: LaterUnits | None,  # noqa: ARG002 (samples of a stream are not prefetched by key)
    ) -> Batch:
        """Return a micro-batch, whose samples are already loaded."""
        assert batch.loaded is not None
        unit = UnitLoader(batch.loaded, self.options.collate, self.options.seed)(key)
        unit = checked_rows(unit, len(key.sample_ids), self.options.collate)
        return pinned(unit) if self.options.pin_memory else unit


def _size_at(sizes: int | BatchRamp, epoch: int, sample_offset: int) -> int:
    """Return the effective batch size of a step; from epoch 1 on, a ramp is in its last stage (`_check_ramp`)."""
    if isinstance(sizes, int):
        return sizes
    return sizes.sizes[-1] if epoch else sizes.at(sample_offset)


def _check_ramp(sizes: int | BatchRamp, start: Position, num_samples: int) -> None:
    """Raise a `DataError` if a ramp has not reached its last stage at the beginning of the second epoch.

    A resumed run could not determine the stage, because it does not know the number of samples of the first epoch.
    """
    if isinstance(sizes, BatchRamp) and start.epoch == 1 and num_samples < sizes.num_samples:
        message = (
            f"the last stage of the ramp ({sizes}) begins after {sizes.num_samples:,} samples, but the first epoch of "
            f"the stream has {num_samples:,}. For a stream, a ramp has to reach its last stage in the first epoch."
        )
        raise DataError(message, code="stage_never_begins")


def _skip(stream: Iterator[StreamSample], start: Position) -> None:
    # Reading seeds the global generators.
    with preserved_random_state():
        num_skipped = sum(1 for _ in itertools.islice(stream, start.sample_offset))
    if num_skipped < start.sample_offset:
        message = (
            f"start.sample_offset={start.sample_offset} is larger than epoch {start.epoch} of the stream, which has "
            f"{num_skipped} samples. Resume with the stream that the position was saved with."
        )
        raise DataError(message, code="start_beyond_epoch")


def check_stream_options(options: BatchOptions, num_shards: int) -> None:
    """Raise a `DataError` for a shuffled stream, or more workers than shards."""
    if options.shuffle:
        message = (
            "shuffle=True needs a data set with an index, but this one is a stream. Pass shuffle=False, and shuffle "
            "inside the data set (its set_epoch(epoch) is called if it has one)."
        )
        raise DataError(message, code="shuffled_stream")
    if options.num_workers > num_shards:
        message = (
            f"num_workers={options.num_workers} is more than the {num_shards} shards of the stream, but a shard "
            f"is read by one worker: use at most num_workers={num_shards}, or divide the stream with ab.Shards."
        )
        raise DataError(message, code="too_many_workers")
