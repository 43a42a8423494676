"""The user's own loader, one per rank: ranks agree when it ends, and a rank that is done first brings nothing."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch.utils.data import DistributedSampler, IterableDataset

from anybatch.core.splitting import even_parts
from anybatch.core.tree import copied, join_samples, read_samples, slice_samples
from anybatch.core.whole_numbers import checked_int, refuse_unless
from anybatch.engine.accumulation.planned_batch import RankShare
from anybatch.engine.failure import failures_reported
from anybatch.errors import AnyBatchWarning, BatchSizeError, DataError
from anybatch.parallel.world import World


def shares(
    loader: Iterable[Any], *, effective_batch_size: int | None = None, world: World | None = None
) -> Iterator[RankShare]:
    """Yield what this rank's loader yields, for as long as any rank's loader does.

    The plain loop `for batch in loader` hangs when ranks have different numbers of batches: those that are done leave
    the others waiting in a reduction. Here a rank that is done brings empty shares until all are.

    Args:
        loader: yields nested batches of any size, this rank's share of each step.
        effective_batch_size: samples of one step over all ranks. The loader's batches are joined, and one that is too
            large is cut and its rest opens the next step; only the last step of the loader may be smaller. Ranks bring
            equally many samples, up to one, until a loader ends; then the others bring more. None: one batch of each
            rank is one step.
        world: the ranks; None asks the environment.

    Raises:
        BatchSizeError: `effective_batch_size` is not a whole number of at least 1.
        DataError: batches that cannot be joined, padded to different lengths, say.
        RankFailedError: another rank ended, because its loader raised, say; what a rank's own loader raises is raised
            there as it is.

    Warns:
        AnyBatchWarning: the loader pads with duplicates, so that some samples would count twice.
    """
    if effective_batch_size is not None:
        checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    refuse_unless(_is_iterable(loader), "loader", loader, "a loader of batches, such as a DataLoader", DataError)
    refuse_unless(world is None or isinstance(world, World), "world", world, "an ab.World, or None")
    _warn_of_duplicates(loader)
    if world is not None:
        yield from _agreed_shares(loader, effective_batch_size, world)
        return
    with World.from_environment() as own:
        yield from _agreed_shares(loader, effective_batch_size, own)


def _is_iterable(loader: object) -> bool:
    return isinstance(loader, Iterable) and not isinstance(loader, type)


def _agreed_shares(loader: Iterable[Any], effective_batch_size: int | None, world: World) -> Iterator[RankShare]:
    batches = iter(loader)
    shares = _shares_as_loaded(batches, world)
    if effective_batch_size is not None:
        shares = _joined_shares(_Samples(batches), effective_batch_size, world)
    for number in itertools.count():
        # In between, where the caller makes its step, this is no call that other ranks could wait in.
        with _reported(world, number):
            share = next(shares, None)
        if share is None:
            return
        yield share


def _reported(world: World, number: int) -> AbstractContextManager[None]:
    """Return what tells the other ranks of an error, and where this one waits, unless a call of the engine's does."""
    if world.roll_call is None or world.roll_call.is_inside:
        return nullcontext()
    return failures_reported(world, f"ab.shares for share {number}", None, lambda: None)


def _shares_as_loaded(batches: Iterator[Any], world: World) -> Iterator[RankShare]:
    while True:
        found: list[Any] = []

        def read(found: list[Any] = found) -> list[float]:
            found.extend(itertools.islice(batches, 1))
            return [len(found)]

        # Every rank asks in every step, also one that is done or has failed: the others would wait for its answer.
        more = world.gather_from(read, 1)
        if not any(row[0] for row in more):
            return
        yield RankShare(found[0] if found else None)


class _Samples:
    """The samples of a loader's batches, taken in any number.

    Attributes:
        num_read: samples that have been read and not been taken.
        is_over: whether the loader has ended.
    """

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._held: Any = None
        self.num_read = 0
        self.is_over = False

    def read(self, number: int) -> None:
        """Read batches until there are so many samples, or until there are no more, and join them.

        Raises:
            DataError: they cannot be joined.
        """
        parts = [self._held] if self.num_read else []
        while self.num_read < number and not self.is_over:
            # A loader may use the memory of its last batch for the next one.
            parts[-1:] = map(copied, parts[-1:])
            try:
                batch, size = read_samples(next(self._batches))
            except StopIteration:
                self.is_over = True
                break
            if size:
                parts.append(batch)
                self.num_read += size
        # Here and not where they are taken: all ranks are told what goes wrong in here.
        self._held = join_samples(parts) if parts else None

    def take(self, number: int) -> Any:  # noqa: ANN401 (any nested batch)
        """Return so many samples as one batch, the next ones; None for none."""
        if not number:
            return None
        taken, rest = self._held, None
        if number < self.num_read:
            taken = slice_samples(self._held, 0, number)
            rest = slice_samples(self._held, number, self.num_read)
        self._held, self.num_read = rest, self.num_read - number
        return taken


def _joined_shares(samples: _Samples, effective_batch_size: int, world: World) -> Iterator[RankShare]:
    """Yield shares that are so many samples together, from batches of any size."""
    while sum(wanted := _shares_of_step(samples, effective_batch_size, world)):
        yield RankShare(samples.take(wanted[world.rank]))


def _shares_of_step(samples: _Samples, effective_batch_size: int, world: World) -> list[int]:
    """Return how many samples each rank brings to the next step; the ranks agree on it."""
    wanted = list(even_parts(effective_batch_size, world.size))
    while True:

        def read(wanted: list[int] = wanted) -> list[float]:
            samples.read(wanted[world.rank])
            return [samples.num_read, samples.is_over]

        rows = world.gather_from(read, 2)
        found = [min(int(number), want) for (number, _), want in zip(rows, wanted, strict=True)]
        missing = effective_batch_size - sum(found)
        # A rank that has more, or may have: the others have brought all that they had.
        able = [
            rank
            for rank, ((number, is_over), want) in enumerate(zip(rows, wanted, strict=True))
            if not is_over or number > want
        ]
        if not missing or not able:
            return found
        wanted = found
        for rank, more in zip(able, even_parts(missing, len(able)), strict=False):
            wanted[rank] += more


def _warn_of_duplicates(loader: Iterable[Any]) -> None:
    """Warn of a loader that repeats samples, so that all ranks get equally many."""
    message = _duplicates_of_sampler(loader) or _duplicates_of_accelerate(loader)
    if message:
        warnings.warn(
            f"{message}: those samples count twice in every epoch. Use ab.batches(dataset), which deals uneven shares, "
            "or drop the rest (drop_last=True).",
            AnyBatchWarning,
            stacklevel=3,
        )


def _duplicates_of_sampler(loader: Any) -> str:  # noqa: ANN401 (any loader)
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if not isinstance(sampler, DistributedSampler):
            continue
        num_samples = len(cast("Sized", sampler.dataset))
        extra = sampler.total_size - num_samples
        if extra > 0:
            return (
                f"DistributedSampler pads {num_samples} samples with {extra} duplicates so that "
                f"{sampler.num_replicas} ranks get {sampler.num_samples} each"
            )
    return ""


def _duplicates_of_accelerate(loader: Any) -> str:  # noqa: ANN401 (any loader)
    """Return the warning about a loader prepared by Accelerate, which its attributes show; else an empty text."""
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    if getattr(sampler, "even_batches", False) and hasattr(sampler, "num_processes"):
        shard: Any = sampler
        source = getattr(shard.batch_sampler, "sampler", None)
    elif isinstance(dataset, IterableDataset) and hasattr(dataset, "num_processes") and hasattr(dataset, "batch_size"):
        shard = dataset
        source = shard.dataset
    else:
        return ""
    # Multiples of this number fill all ranks.
    multiple_of = shard.batch_size and shard.batch_size * (
        1 if getattr(shard, "split_batches", False) else shard.num_processes
    )
    if shard.num_processes == 1 or getattr(shard, "drop_last", False):
        return ""
    if multiple_of is None or not isinstance(source, Sized):
        return "Accelerate repeats samples at the end of an epoch if they do not fill the batches of all ranks"
    extra = -len(source) % multiple_of
    if not extra:
        return ""
    return (
        f"Accelerate pads {len(source)} samples with {extra} duplicates so that {shard.num_processes} ranks get full "
        "batches (even_batches=True)"
    )
