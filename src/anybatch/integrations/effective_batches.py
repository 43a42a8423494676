"""A DataLoader of effective batches, for loops of other libraries: each item is this rank's share, in micro-batches."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from anybatch.core.geometry import ceil_div, checked_int
from anybatch.core.splitting import SplitOptions, plan_batch
from anybatch.data.indexed import sample_order, sampled_order
from anybatch.data.loading import UnitKey, UnitLoader
from anybatch.data.options import check_sampler_order
from anybatch.errors import BatchSizeError, DataError, DoesNotFitError

SHUFFLED = ("RandomSampler", "SeedableRandomSampler")  # torch's, and the one by which Accelerate replaces it


class World(NamedTuple):
    """This rank, and the number of ranks."""

    rank: int
    num_ranks: int


class StepKey(NamedTuple):
    """The samples of one effective batch, over all ranks."""

    epoch: int
    sample_ids: tuple[int, ...]


class Share(NamedTuple):
    """This rank's share of an effective batch."""

    key: StepKey
    micro_batches: list[Any]  # of the same number on all ranks, since some losses communicate
    weights: list[float]  # 1.0; 0.0 for a filler, a repeated micro-batch that must not count
    micro_batch_size: int  # the maximum

    @property
    def pairs(self) -> list[tuple[Any, float]]:
        """The micro-batches with their weights."""
        return list(zip(self.micro_batches, self.weights, strict=True))


class Shares(torch.utils.data.Dataset[Any]):
    """A data set whose items are shares of effective batches; it can be used in the workers of a DataLoader."""

    def __init__(self, loader: UnitLoader, micro_batch_size: int, world: World) -> None:
        self.loader = loader
        self.micro_batch_size = micro_batch_size
        self._world = world

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.loader.dataset)

    def __getitems__(self, key: StepKey) -> Share:
        """Load this rank's share of an effective batch."""
        split = SplitOptions(micro_batch_size=self.micro_batch_size, lockstep=True)
        plan = plan_batch(len(key.sample_ids), self._world.num_ranks, split)
        units = plan.shares[self._world.rank]
        ids = [tuple(key.sample_ids[position] for position in plan.positions(unit)) for unit in units]
        loaded = [self.loader(UnitKey(key.epoch, of_unit)) for of_unit in ids]
        return Share(key, loaded, [unit.weight for unit in units], self.micro_batch_size)

    def at_current_size(self, share: Share) -> Share:
        """Return the share in micro-batches of the current size: a worker keeps the size that it started with."""
        return share if share.micro_batch_size <= self.micro_batch_size else self.__getitems__(share.key)

    def halve(self, share: Share, reason: str) -> Share:
        """Halve the micro-batch size from now on, and return the share, split again; raise if the size is 1."""
        # A batch may be smaller than the limit.
        size = min(self.micro_batch_size, ceil_div(len(share.key.sample_ids), self._world.num_ranks))
        if size <= 1:
            message = f"not even 1 sample at a time fits into memory. torch says: {reason}"
            raise DoesNotFitError(message, micro_batch_size=1)
        self.micro_batch_size = ceil_div(size, 2)
        return self.__getitems__(share.key)


class EffectiveBatchSampler:
    """Yields the sample ids of each effective batch of an epoch; they do not depend on the number of ranks.

    Shuffled and sequential order are ours; those of other samplers are drawn from the host's sampler.
    """

    def __init__(
        self, num_samples: int, effective_batch_size: int, *, seed: int, sampler: Any, drop_last: bool = False
    ) -> None:
        self.epoch = 0
        self.num_skipped = 0  # effective batches that the next iteration leaves out; 0 again after it has begun
        self._size = checked_int("effective_batch_size", effective_batch_size, error=BatchSizeError)
        self._num_samples, self._seed, self._sampler, self._drop_last = num_samples, seed, sampler, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of effective batches in an epoch."""
        return self._num_samples // self._size if self._drop_last else ceil_div(self._num_samples, self._size)

    def __iter__(self) -> Iterator[StepKey]:
        """Yield the effective batches of the current epoch."""
        epoch, ids = self.epoch, self._order()
        first, self.num_skipped = self.num_skipped, 0
        for number in range(first, len(self)):
            yield StepKey(epoch, tuple(ids[number * self._size : (number + 1) * self._size]))

    def _order(self) -> Sequence[int]:
        order = {"seed": self._seed, "epoch": self.epoch}
        shuffled = type(self._sampler).__name__ in SHUFFLED and not getattr(self._sampler, "replacement", False)
        if shuffled or isinstance(self._sampler, SequentialSampler):
            return sample_order(self._num_samples, shuffle=shuffled, **order).tolist()
        return sampled_order(self._sampler, self._num_samples, **order).tolist()


class ShareLoader(DataLoader[Any]):
    """A DataLoader over `Shares`; trainers call its `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def share_loader(
    loader: DataLoader[Any], effective_batch_size: int, micro_batch_size: int, world: World, *, seed: int
) -> ShareLoader:
    """Return a loader of effective batches with the data set, sampler, collate function and workers of another loader.

    The seed is that of the sample order, and of each sample's augmentation.

    Raises:
        DataError: the data set is iterable, or the sampler cannot be used.
        BatchSizeError: a size is not a whole number of at least 1.
    """
    checked_int("micro_batch_size", micro_batch_size, error=BatchSizeError)
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        message = (
            f"effective_batch_size= needs a data set with a length and an index, not {type(dataset).__name__}: a step "
            "takes samples by number. Convert the data set, for example to a list, or leave out effective_batch_size."
        )
        raise DataError(message, code="iterable_data")
    batch_sampler = innermost_batch_sampler(loader)
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is not BatchSampler or sampler is None:
        message = (
            f"effective_batch_size= chooses the samples of each step, and so does the loader's batch sampler "
            f"({type(batch_sampler).__name__}). Pass a loader with a sampler instead."
        )
        raise DataError(message, code="batch_sampler")
    if not isinstance(sampler, RandomSampler):  # whose generator is not used
        check_sampler_order(sampler)
    return ShareLoader(
        Shares(UnitLoader(dataset, loader.collate_fn, seed), micro_batch_size, world),
        batch_sampler=EffectiveBatchSampler(
            len(dataset), effective_batch_size, seed=seed, sampler=sampler, drop_last=bool(batch_sampler.drop_last)
        ),  # type: ignore[arg-type]
        collate_fn=itself,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        generator=torch.Generator(),  # seeds workers, for which each iteration would draw a global random number
    )


def innermost_batch_sampler(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a loader, without the wrappers that Accelerate adds for each rank."""
    batch_sampler: Any = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler


def upper_limit(loader: DataLoader[Any]) -> Any:
    """Return a loader's batch size, which is the maximum size of a micro-batch."""
    return getattr(innermost_batch_sampler(loader), "batch_size", 1)


def itself(value: Any, *_: Any, **__: Any) -> Any:
    """Return the first argument."""
    return value
