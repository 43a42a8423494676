"""`ab.shares`: one loader per rank yields the rank's shares of effective batches, and empty shares after its end."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch.utils.data import DistributedSampler, IterableDataset

from anybatch.core.geometry import checked_int, require
from anybatch.core.splitting import even_parts
from anybatch.core.tree import copied, join_samples, mark_and_count, slice_samples
from anybatch.engine.micro_batches import RankShare
from anybatch.engine.parts import failures_reported
from anybatch.errors import AnyBatchWarning, BatchSizeError, DataError
from anybatch.parallel.world import World


def shares(
    loader: Iterable[Any], *, effective_batch_size: int | None = None, world: World | None = None
) -> Iterator[RankShare]:
    """Yield the batches of this rank's loader until the loaders of all ranks have ended.

    The plain loop `for batch in loader` hangs if ranks have different numbers of batches, because ranks with a batch
    wait in a reduction for the other ranks. Here a rank yields empty shares after the end of its loader, until all
    loaders have ended.

    Args:
        loader: yields batches of any size, as tensors or dicts, lists or tuples of tensors; they are this rank's share.
        effective_batch_size: samples per step over all ranks. Batches of the loader are joined or split to this size;
            only the last step may be smaller. The numbers of samples of the ranks differ by at most one until a loader
            ends; then the other ranks contribute more. None: one batch from each rank is one step.
        world: the ranks; None: from the environment.

    Raises:
        BatchSizeError: `effective_batch_size` is not a whole number of at least 1.
        DataError: batches cannot be joined, for example because they are padded to different lengths.
        RankFailedError: another rank has failed, for example because its loader raised. Errors of this rank's loader
            are raised unchanged.

    Warns:
        AnyBatchWarning: the loader pads with duplicates, so some samples would count twice.
    """
    if effective_batch_size is not None:
        checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
    require(_is_iterable(loader), "loader", loader, "a loader of batches, such as a DataLoader", DataError)
    require(world is None or isinstance(world, World), "world", world, "an ab.World, or None")
    _warn_of_duplicates(loader)
    if world is not None:
        yield from _agreed_shares(loader, effective_batch_size, world)
        return
    with World.from_environment() as created:
        yield from _agreed_shares(loader, effective_batch_size, created)


def _is_iterable(loader: object) -> bool:
    return isinstance(loader, Iterable) and not isinstance(loader, type)


def _agreed_shares(loader: Iterable[Any], effective_batch_size: int | None, world: World) -> Iterator[RankShare]:
    batches = iter(loader)
    shares = _shares_as_loaded(batches, world)
    if effective_batch_size is not None:
        shares = _joined_shares(_Samples(batches), effective_batch_size, world)
    for number in itertools.count():
        # The context does not include the yield: during the caller's step no rank waits in this call.
        with _reported(world, number):
            share = next(shares, None)
        if share is None:
            return
        yield share


def _reported(world: World, number: int) -> AbstractContextManager[None]:
    """Return a context that reports errors to other ranks; no-op inside an engine call, which already reports them."""
    if world.call_tracker is None or world.call_tracker.is_inside:
        return nullcontext()
    return failures_reported(world, f"ab.shares for share {number}", None, lambda: None)


def _shares_as_loaded(batches: Iterator[Any], world: World) -> Iterator[RankShare]:
    while True:
        loaded: list[Any] = []

        def read(loaded: list[Any] = loaded) -> list[float]:
            loaded.extend(itertools.islice(batches, 1))
            return [len(loaded)]

        # Every rank takes part in every step, even if its loader has ended or failed: other ranks wait for its answer.
        num_loaded = world.gather_from(read, 1)
        if not any(row[0] for row in num_loaded):
            return
        yield RankShare(loaded[0] if loaded else None)


class _Samples:
    """The samples of a loader, available in any number."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._joined: Any = None
        self.num_read = 0
        self.is_over = False

    def read(self, number: int) -> None:
        """Read and join batches until there are `number` samples, or the loader ends.

        Raises:
            DataError: the batches cannot be joined.
        """
        parts = [self._joined] if self.num_read else []
        while self.num_read < number and not self.is_over:
            # Copy the last batch, because a loader may reuse its memory for the next batch.
            parts[-1:] = map(copied, parts[-1:])
            try:
                batch, size = mark_and_count(next(self._batches))
            except StopIteration:
                self.is_over = True
                break
            if size:
                parts.append(batch)
                self.num_read += size
        # Join here and not in `take`, because only errors of this method are reported to all ranks.
        self._joined = join_samples(parts) if parts else None

    def take(self, number: int) -> Any:  # noqa: ANN401 (any nested batch)
        """Return the next `number` samples as one batch; None for 0."""
        if not number:
            return None
        first, rest = self._joined, None
        if number < self.num_read:
            first = slice_samples(self._joined, 0, number)
            rest = slice_samples(self._joined, number, self.num_read)
        self._joined, self.num_read = rest, self.num_read - number
        return first


def _joined_shares(samples: _Samples, effective_batch_size: int, world: World) -> Iterator[RankShare]:
    """Yield shares with `effective_batch_size` samples over all ranks, from batches of any size."""
    while sum(wanted := _shares_of_step(samples, effective_batch_size, world)):
        yield RankShare(samples.take(wanted[world.rank]))


def _shares_of_step(samples: _Samples, effective_batch_size: int, world: World) -> list[int]:
    """Return the number of samples of each rank in the next step; the same on all ranks."""
    wanted = list(even_parts(effective_batch_size, world.size))
    while True:

        def read(wanted: list[int] = wanted) -> list[float]:
            samples.read(wanted[world.rank])
            return [samples.num_read, samples.is_over]

        rows = world.gather_from(read, 2)
        available = [min(int(number), want) for (number, _), want in zip(rows, wanted, strict=True)]
        missing = effective_batch_size - sum(available)
        with_more = [  # ranks that have or may have more samples
            rank
            for rank, ((number, is_over), want) in enumerate(zip(rows, wanted, strict=True))
            if not is_over or number > want
        ]
        if not missing or not with_more:
            return available
        wanted = available
        for rank, more in zip(with_more, even_parts(missing, len(with_more)), strict=False):
            wanted[rank] += more


def _warn_of_duplicates(loader: Iterable[Any]) -> None:
    """Warn about a loader that repeats samples to give all ranks the same number."""
    message = _duplicates_of_sampler(loader) or _duplicates_of_accelerate(loader)
    if message:
        warnings.warn(
            f"{message}: duplicates count twice in every epoch. Use ab.batches(dataset), which gives ranks unequal "
            "shares, or drop the last samples (drop_last=True).",
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
    """Return the warning about a loader of Accelerate, recognized by its attributes; otherwise an empty text."""
    sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    if getattr(sampler, "even_batches", False) and hasattr(sampler, "num_processes"):
        shard: Any = sampler
        source = getattr(shard.batch_sampler, "sampler", None)
    elif isinstance(dataset, IterableDataset) and hasattr(dataset, "num_processes") and hasattr(dataset, "batch_size"):
        shard = dataset
        source = shard.dataset
    else:
        return ""
    # Full batches on all ranks need a multiple of this number.
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
