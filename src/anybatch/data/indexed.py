"""Data sets with an index (`__getitem__` and `__len__`): a global sample order, its steps, and their samples."""

import ctypes
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import Subset

from anybatch.core.batch import LaterUnits, Position
from anybatch.core.geometry import ceil_div
from anybatch.core.randomness import order_seed
from anybatch.core.schedules import BatchRamp
from anybatch.core.tree import Batch
from anybatch.data.collate import KnownLengths
from anybatch.data.effective_batch import OpenSource, StepSamples
from anybatch.data.loading import OverEffectiveBatch, UnitKey, UnitLoader, checked_rows, pinned, unit_keys
from anybatch.data.options import BatchOptions, RunRange
from anybatch.data.prefetch import Prefetcher
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.errors import BatchSizeError, DataError


def sample_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Return the ids of all samples in the order of `epoch`: int64 tensor (num_samples,).

    The order depends only on the arguments, so that every rank and every resumed run computes the same order.
    """
    if not shuffle:
        return torch.arange(num_samples)
    # A separate generator, so that the order depends on the seed alone and the caller's state does not change.
    generator = torch.Generator().manual_seed(order_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def sampled_order(sampler: Any, num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:  # noqa: ANN401 (torch's)
    """Return the ids that a sampler draws in `epoch`: int64 tensor (num_samples,); the same on every rank.

    The sampler may draw from the global generators, which are seeded from (seed, epoch). `set_epoch` is called, if any.
    """
    with preserved_random_state():
        seed_generators(order_seed(seed, epoch))
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        drawn = list(sampler)
    if len(drawn) != num_samples or not all(isinstance(index, (int, torch.Tensor)) for index in drawn):
        kinds = ", ".join(sorted({type(index).__name__ for index in drawn}))
        message = (
            f"the sampler yielded {len(drawn)} items ({kinds}), but must yield {num_samples} indices, its length. "
            "Each index is of a single sample; for a batch sampler, pass the sampler inside it."
        )
        raise DataError(message, code="sampler_of_batches")
    return torch.tensor([int(index) for index in drawn], dtype=torch.int64)


def digest_of_ids(ids: torch.Tensor, before: int = 0) -> int:
    """Return a checksum of sample ids, int64 (ids,), in their order; `before` is the checksum of the preceding ids."""
    ids = ids.contiguous()
    return crc32(ctypes.string_at(ids.data_ptr(), ids.numel() * ids.itemsize), before)


def digest_of_subset(dataset: object) -> int:
    """Return a checksum of the indices of a `Subset`, such as a part of `random_split`; 0 for other data sets."""
    digest = 0
    while isinstance(dataset, Subset):
        digest = digest_of_ids(torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu"), digest)
        dataset = dataset.dataset
    return digest


@dataclass(frozen=True, slots=True)
class SampleSchedule:
    """The division of an epoch of `num_samples` into steps. Batches do not cross epochs; the last one may be smaller.

    A step may start at any offset, not only at multiples of the effective batch size, because a run may be resumed with
    a different effective batch size.
    """

    num_samples: int
    options: BatchOptions

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch; raises a `TypeError` under a ramp, where epochs differ."""
        if isinstance(self.options.effective_batch_size, BatchRamp):
            message = (
                f"the number of steps differs from epoch to epoch: batches of {self.options.effective_batch_size}."
            )
            raise TypeError(message)
        return self._steps_from(Position())

    def size_at(self, position: Position) -> int:
        """Return the effective batch size of a step that begins at a position; a ramp also counts dropped samples."""
        size = self.options.effective_batch_size
        return size if isinstance(size, int) else size.at(self._num_before(position))

    def normalized(self, position: Position) -> Position:
        """Return the start of the next step: `position`, or the next epoch's start if this epoch has no step left."""
        has_step = (
            position.sample_offset + (self.size_at(position) if self.options.drop_last else 1) <= self.num_samples
        )
        return position if has_step else Position(position.epoch + 1)

    def num_steps(self, span: RunRange) -> int:
        """Return the number of steps of a run of whole epochs."""
        starts = (span.start, *map(Position, range(span.start.epoch + 1, span.end_epoch or 0)))
        return sum(self._steps_from(start) for start in starts if start < Position(span.end_epoch or 0))

    def steps_of_epoch(self, position: Position) -> Iterator[tuple[Position, int, Position]]:
        """Yield the steps from `position` to the end of its epoch: (start, offset after its samples, next start)."""
        start = self.normalized(position)
        while start.epoch == position.epoch:
            stop = min(start.sample_offset + self.size_at(start), self.num_samples)
            end = self.normalized(Position(start.epoch, stop))
            yield start, stop, end
            start = end

    def _steps_from(self, position: Position) -> int:
        size, rest = self.options.effective_batch_size, max(0, self.num_samples - position.sample_offset)
        if isinstance(size, BatchRamp):
            if self._num_before(position) < size.num_samples:  # in the last stage all sizes are equal
                return sum(1 for _ in self.steps_of_epoch(position))
            size = size.sizes[-1]
        return rest // size if self.options.drop_last else ceil_div(rest, size)

    def _num_before(self, position: Position) -> int:
        return position.epoch * self.num_samples + position.sample_offset


class OpenIndexed(OpenSource):
    """The reader of a data set with an index; all iterations share `lengths`, the lengths of its samples."""

    def __init__(self, dataset: Any, schedule: SampleSchedule, lengths: KnownLengths | None) -> None:  # noqa: ANN401 (torch has no type for it)
        options = schedule.options
        super().__init__(dataset, options, lengths)
        self.num_samples = schedule.num_samples
        self._loader = UnitLoader(dataset, options.collate, options.seed)
        self._schedule = schedule
        self._ordered_steps = _OrderedSteps(schedule, lengths)
        self._workers: Prefetcher | None = None
        if options.num_workers:
            self._workers = Prefetcher(self._loader, num_workers=options.num_workers, pin_memory=options.pin_memory)

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step in a range; raise a `DataError` if the range begins beyond the data."""
        _check_start(self._schedule, span.start)
        self._ordered_steps.end_epoch = span.end_epoch
        self._ordered_steps.num_left = span.steps
        return self._steps(
            itertools.islice(self._ordered_steps.steps(self._schedule.normalized(span.start)), span.steps)
        )

    def _steps(self, steps: Iterator[tuple[Position, Position, tuple[int, ...]]]) -> Iterator[StepSamples]:
        for start, end, ids in steps:
            if self._ordered_steps.num_left is not None:
                self._ordered_steps.num_left -= 1
            yield StepSamples(sample_ids=ids, start=start, end=end, source=self)

    @functools.cached_property
    def subset_digest(self) -> int:
        """Checksum of the indices of a `Subset`; 0 for other data sets."""
        return digest_of_subset(self.dataset)

    def digest_before(self, position: Position) -> int:
        """Return the checksum of an epoch's sample ids before a position."""
        return digest_of_ids(self._ordered_steps.ids_before(position), self.subset_digest)

    def sampled_order(self, epoch: int) -> torch.Tensor | None:
        """Return the ids that a sampler has drawn in an epoch; None without a sampler."""
        return self._ordered_steps.sampled.get(epoch)

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Use an epoch's order from a checkpoint, if there is a sampler."""
        self._ordered_steps.use_order(epoch, order)

    def close(self) -> None:
        """Shut the workers down."""
        if self._workers is not None:
            self._workers.close()

    def load(self, key: UnitKey, batch: StepSamples, keys: Sequence[UnitKey], later_units: LaterUnits | None) -> Batch:
        """Return the micro-batch of `key`, from the workers if there are any."""
        num_samples, collate = len(key.sample_ids), self.options.collate
        if self._workers is None:
            unit = checked_rows(self._loader(key), num_samples, collate)
            return pinned(unit) if self.options.pin_memory else unit
        next_keys = functools.partial(self._ordered_steps.keys_from, keys, batch, later_units)
        return checked_rows(self._workers.take(key, next_keys), num_samples, collate)


class _OrderedSteps:
    """The sample ids of each step, from any position; shared by the batches and the workers that prefetch.

    Workers reference this object and not the source, so that garbage-collecting the source shuts them down.
    """

    def __init__(self, schedule: SampleSchedule, lengths: KnownLengths | None) -> None:
        options = schedule.options
        self._schedule = schedule
        self._seed = options.seed
        self._shuffle = options.shuffle
        self._sampler = options.sampler
        self._lengths = lengths
        self._is_collated_whole = isinstance(options.collate, OverEffectiveBatch)
        self.end_epoch: int | None = None
        self.num_left: int | None = None  # remaining steps after the newest batch; None for a run of epochs
        # Weak references, so that the order of an epoch is freed when no iteration uses it any more.
        self._orders: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        # A sampler may draw a different order in a resumed run, so checkpoints contain the newest orders.
        self.sampled: dict[int, torch.Tensor] = {}

    def steps(self, position: Position) -> Iterator[tuple[Position, Position, tuple[int, ...]]]:
        """Yield (start, next start, sample ids) of each step from `position` to the end of the last epoch."""
        while self.end_epoch is None or position.epoch < self.end_epoch:
            order = self._order(position.epoch)
            for start, stop, end in self._schedule.steps_of_epoch(position):
                # Plain integers, because they become parts of keys, which are compared and sent to workers.
                yield start, end, tuple(order[start.sample_offset : stop].tolist())
            position = Position(position.epoch + 1)

    def ids_before(self, position: Position) -> torch.Tensor:
        """Return the sample ids of an epoch before a position."""
        if not position.sample_offset:
            return torch.empty(0, dtype=torch.int64)
        return self._order(position.epoch)[: position.sample_offset]

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Use an epoch's order from a checkpoint, if there is a sampler."""
        # A different set of samples means different data, which the digest check reports.
        if self._sampler is not None and torch.equal(self._order(epoch).sort()[0], order.sort()[0]):
            self._orders[epoch] = self.sampled[epoch] = order

    def keys_from(
        self, keys: Sequence[UnitKey], batch: StepSamples, later_units: LaterUnits | None
    ) -> Iterator[UnitKey]:
        """Yield the remaining keys of a batch, then the keys of this rank's micro-batches in later batches."""
        yield from keys
        if later_units is None:
            return
        for start, _, sample_ids in itertools.islice(self.steps(batch.end), self.num_left):
            if self._is_collated_whole:
                yield UnitKey(start.epoch, sample_ids)
                continue
            lengths = None if self._lengths is None else self._lengths.of(sample_ids)
            if lengths is not None and batch.packed is not None:
                lengths = lengths.in_layout(packed=batch.packed)
            units = later_units(len(sample_ids), lengths)
            yield from unit_keys(start.epoch, sample_ids, units, packed=batch.packed)

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the sample order of `epoch`, as one tensor that all current users of the epoch share."""
        order = self._orders.get(epoch)
        if order is None:
            if self._sampler is not None:
                order = sampled_order(self._sampler, self._schedule.num_samples, seed=self._seed, epoch=epoch)
                # Workers are at most one epoch ahead of the batches.
                newest = {number: kept for number, kept in self.sampled.items() if number >= epoch - 1}
                self.sampled = newest | {epoch: order}
            else:
                order = sample_order(self._schedule.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._orders[epoch] = order
        return order


def checked_schedule(dataset: Any, options: BatchOptions) -> SampleSchedule:  # noqa: ANN401 (torch has no type for it)
    """Return the schedule of a data set with an index.

    Raises:
        BatchSizeError: a stage of a ramp has larger batches than the data set.
        DataError: there would be no batch, or the start is beyond the data.
    """
    num_samples, size = len(dataset if options.sampler is None else options.sampler), options.effective_batch_size
    schedule = SampleSchedule(num_samples, options)
    if num_samples == 0:
        message = "the data set is empty: len(dataset)=0, and a step needs at least 1 sample. Check its source."
        raise DataError(message, code="empty")
    # A size without a ramp may exceed the data set: each step is then an epoch. But a stage would never begin.
    if isinstance(size, BatchRamp) and max(size.sizes) > num_samples:
        message = (
            f"the ramp ({size}) has steps of {max(size.sizes):,} samples, but the data set has {num_samples:,}. "
            f"Batches do not cross epochs, so use at most {num_samples:,}."
        )
        raise BatchSizeError(message, code="stage_never_begins")
    if isinstance(size, int) and schedule.steps_per_epoch == 0:
        message = (
            f"drop_last=True leaves no batch: effective_batch_size={size}, but the data set has {num_samples} samples. "
            f"Use drop_last=False, or at most {num_samples}."
        )
        raise DataError(message, code="no_full_batch")
    _check_start(schedule, options.span.start)
    return schedule


def _check_start(schedule: SampleSchedule, start: Position) -> None:
    if start.sample_offset > schedule.num_samples:
        message = (
            f"start.sample_offset={start.sample_offset} is larger than an epoch of {schedule.num_samples} samples. "
            "Resume with the data set that the position was saved with."
        )
        raise DataError(message, code="start_beyond_epoch")
