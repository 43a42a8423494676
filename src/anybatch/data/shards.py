"""Read a stream in rounds, one sample of each shard per round, in this process or in several workers."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anybatch.core.randomness import order_seed, sample_seed
from anybatch.data.random_state import seed_generators
from anybatch.data.serialization import packed
from anybatch.data.torch_internals import hides_worker
from anybatch.errors import DataError

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
        raise DataError(message)
    if isinstance(part, str) or not isinstance(part, Iterable):
        message = (
            f"{name} is of type {type(part).__name__}; its samples can be neither indexed nor iterated. "
            "Pass a data set with __getitem__ and __len__, or a stream: an object with __iter__."
        )
        raise DataError(message)


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
            raise DataError(message)
        return num_shards
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        message = (
            f"the shards are of type {type(parts).__name__}. Pass a list of iterables, or a function that returns the "
            "iterable of a shard, with num_shards."
        )
        raise DataError(message)
    if num_shards is not None:
        message = f"num_shards={num_shards!r} is for a function only; leave it out for a list of {len(parts)} shards."
        raise DataError(message)
    if not parts:
        message = "Shards([]) has 0 shards and needs at least 1. Check the list of files or parts."
        raise DataError(message)
    for number, part in enumerate(parts):
        check_readable(part, f"shard {number}")
    return len(parts)
