"""Data sets with an index (`__getitem__` and `__len__`): loaded unit by unit, in any order."""

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import default_collate

from anybatch.core.batch import LaterUnits, Position, Positions, taken
from anybatch.core.schedules import BatchRamp
from anybatch.core.token_budget import SampleLengths
from anybatch.core.tree import Batch, pick_samples, tensors_of
from anybatch.data.collate import Collate, KnownLengths
from anybatch.data.effective_batch import StepSamples
from anybatch.data.loading import KeyedUnits, OverEffectiveBatch, UnitKey, UnitLoader, checked_rows, pinned
from anybatch.data.options import (
    BatchOptions,
    RunRange,
    SampleSchedule,
    digest_of_ids,
    digest_of_subset,
    sample_order,
    sampled_order,
)
from anybatch.data.prefetch import Prefetcher
from anybatch.errors import BatchSizeError, DataError

_IDS_AT_ONCE = 4_096
"""Ids converted from the order in one call: converting a few per step would spend most of the time in torch calls."""
BYTES_AT_ONCE = 64 * 2**10
"""Maximum bytes of units loaded together in the calling process, unless a single unit has more."""


class IndexedSource:
    """Effective batches of a data set with an index (`__getitem__` and `__len__`).

    Raises:
        DataError: nothing would be yielded, or the start is beyond the data.
    """

    def __init__(self, dataset: Any, request: BatchOptions) -> None:  # noqa: ANN401 (torch has no type for it)
        self._loader = UnitLoader(dataset, request.collate, request.seed)
        self._request = request
        num_samples = len(dataset if request.sampler is None else request.sampler)
        self._known = None if request.lengths is None else KnownLengths(request.lengths, request.collate, dataset)
        self._schedule = SampleSchedule(num_samples, request)
        _check_schedule(self._schedule)
        _check_start(self._schedule, request.span.start)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a whole epoch."""
        return self._schedule.steps_per_epoch

    @property
    def num_steps(self) -> int:
        """Number of steps from the start to the end."""
        span = self._request.span
        return self._schedule.num_steps(span.start, span.end_epoch, span.steps)

    def open(self) -> "OpenIndexed":
        """Return the source with its own workers."""
        return OpenIndexed(self._loader, self._schedule, self._request, self._known)


class OpenIndexed:
    """An indexed source that is being read."""

    def __init__(
        self, loader: UnitLoader, schedule: SampleSchedule, request: BatchOptions, known: KnownLengths | None
    ) -> None:
        self.dataset = loader.dataset
        self.num_samples = schedule.num_samples
        self._schedule = schedule
        self._ahead: Prefetcher[UnitKey, Batch] | None = None
        if request.num_workers:
            self._ahead = Prefetcher(KeyedUnits(loader), num_workers=request.num_workers, pin_memory=request.pin_memory)
        self._walk = _Walk(schedule, request, known)
        self._find_lengths = None if known is None else self._walk.lengths
        self._feeder = _Feeder(
            self._walk,
            loader,
            self._ahead,
            pin_memory=request.pin_memory,
            here=KeyedUnits(loader),
            first_unit=_FirstUnit(),
        )

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step of a span; refuse a span that begins beyond the data."""
        _check_start(self._schedule, span.start)
        self._walk.end = self._schedule.end(span.start, span.end_epoch, span.steps)
        steps = self._walk.steps(self._schedule.normalized(span.start))
        return (
            StepSamples(sample_ids=ids, start=start, end=end, feeder=self._feeder, find_lengths=self._find_lengths)
            for start, end, ids in steps
        )

    @functools.cached_property
    def subset_digest(self) -> int:
        """Checksum of the indices of a subset."""
        return digest_of_subset(self.dataset)

    def digest_before(self, position: Position) -> int:
        """Return the checksum of the ids of an epoch before a position."""
        return digest_of_ids(self._walk.ids_before(position), self.subset_digest)

    def sampled_order(self, epoch: int) -> torch.Tensor | None:
        """Return the ids that a sampler has drawn in an epoch; None without a sampler."""
        return self._walk.sampled.get(epoch)

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Use an epoch's order from a checkpoint, if there is a sampler."""
        self._walk.use_order(epoch, order)

    def close(self) -> None:
        """Shut the workers down."""
        if self._ahead is not None:
            self._ahead.close()


class _Walk:
    """The schedule of samples by step, from any position; shared by the batches and the workers that prefetch."""

    def __init__(self, schedule: SampleSchedule, request: BatchOptions, known: KnownLengths | None) -> None:
        self._schedule = schedule
        self._seed = request.seed
        self._shuffle = request.shuffle
        self._sampler = request.sampler
        self._known = known
        self.end = Position()
        # Weak references, so that the order of an epoch is freed with its last user.
        self._orders: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        # A sampler may draw another order next time, so checkpoints include the newest orders.
        self.sampled: dict[int, torch.Tensor] = {}

    def steps(self, position: Position) -> Iterator[tuple[Position, Position, tuple[int, ...]]]:
        """Yield start, end and sample ids of each effective batch from `position` to the end of the run."""
        while position < self.end:
            order, first = self._order(position.epoch), 0
            ids: list[int] = []
            for start, stop, end in self._schedule.places_of_steps(position):
                if start >= self.end:
                    return
                if stop > first + len(ids):
                    first = start.sample_offset
                    # Plain integers, because they become parts of keys, which are compared and sent to workers.
                    ids = order[first : max(stop, first + _IDS_AT_ONCE)].tolist()
                yield start, end, tuple(ids[start.sample_offset - first : stop - first])
            position = Position(position.epoch + 1)

    def ids_before(self, position: Position) -> torch.Tensor:
        """Return the ids of an epoch before a position."""
        if not position.sample_offset:
            return torch.empty(0, dtype=torch.int64)
        return self._order(position.epoch)[: position.sample_offset]

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Use an epoch's order from a checkpoint, if there is a sampler."""
        # A different set of samples means different data, which the digest check reports.
        if self._sampler is not None and torch.equal(self._order(epoch).sort()[0], order.sort()[0]):
            self._orders[epoch] = self.sampled[epoch] = order

    def lengths(self, sample_ids: Sequence[int]) -> SampleLengths | None:
        """Return the lengths of some samples; None if unknown."""
        return None if self._known is None else self._known.of(sample_ids)

    def unit_keys_from(self, position: Position, later_units: LaterUnits, *, packed: bool | None) -> Iterator[UnitKey]:
        """Yield the keys of all units of this rank from `position` on, as far as they can be predicted."""
        for start, _, sample_ids in self.steps(position):
            lengths = self.lengths(sample_ids)
            if lengths is not None and packed is not None:
                lengths = lengths.in_layout(packed=packed)
            units = later_units(len(sample_ids), lengths)
            yield from _unit_keys(start.epoch, sample_ids, units, packed=packed)

    def step_keys_from(self, position: Position) -> Iterator[UnitKey]:
        """Yield the keys of whole effective batches from `position` on."""
        return (UnitKey(start.epoch, sample_ids) for start, _, sample_ids in self.steps(position))

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the order of `epoch`, one tensor shared by all current users of that epoch."""
        order = self._orders.get(epoch)
        if order is None:
            if self._sampler is not None:
                order = sampled_order(self._sampler, self._schedule.num_samples, seed=self._seed, epoch=epoch)
                # Workers are at most one epoch ahead of the batches.
                self.sampled = {one: kept for one, kept in self.sampled.items() if one >= epoch - 1} | {epoch: order}
            else:
                order = sample_order(self._schedule.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._orders[epoch] = order
        return order


class _FirstUnit:
    """Properties of the first unit that later units share: how many to load together, and if checks are needed."""

    def __init__(self) -> None:
        self.num_at_once = 1
        self.is_known = False
        self.is_plain = False

    def note(self, unit: Batch) -> None:
        """Measure the size of a unit."""
        self.is_known = True
        # Not `nbytes`, which sparse tensors do not support.
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(unit))
        self.num_at_once = max(1, BYTES_AT_ONCE // num_bytes) if num_bytes else 1

    def checked(self, unit: Batch, num_samples: int, collate: Collate) -> Batch:
        """Return a unit with its lists marked, see `checked_rows`."""
        if self.is_plain:
            return unit
        found = checked_rows(unit, num_samples, collate)
        # torch's default makes units of one structure, usually without lists to mark.
        self.is_plain = collate is default_collate and found is unit
        return found


@dataclass(frozen=True, slots=True)
class _Feeder:
    """Feeds the batches of one run.

    Workers reference the schedule, not the feeder, so garbage-collecting the feeder shuts them down.
    """

    walk: _Walk
    loader: UnitLoader
    ahead: Prefetcher[UnitKey, Batch] | None
    pin_memory: bool
    here: KeyedUnits
    first_unit: _FirstUnit

    def __call__(
        self, batch: StepSamples, units: Sequence[Positions], later_units: LaterUnits | None
    ) -> Iterator[Batch]:
        if isinstance(self.loader.collate, OverEffectiveBatch):
            return self._cut(batch, units, later_units) if units else iter(())
        keys = _unit_keys(batch.start.epoch, batch.sample_ids, units, packed=batch.packed)
        return self._loaded_here(keys) if self.ahead is None else self._taken(self.ahead, keys, batch, later_units)

    def _taken(
        self,
        ahead: Prefetcher[UnitKey, Batch],
        keys: Sequence[UnitKey],
        batch: StepSamples,
        later_units: LaterUnits | None,
    ) -> Iterator[Batch]:
        """Receive units from the workers."""
        for index, key in enumerate(keys):
            # A function, because the later keys are needed only if the workers have to restart.
            unit = ahead.take(key, functools.partial(self._onward, keys, index, batch, later_units))
            yield self.first_unit.checked(unit, len(key.sample_ids), self.loader.collate)

    def _loaded_here(self, keys: Sequence[UnitKey]) -> Iterator[Batch]:
        """Load several units together: for small units, saving the caller's random state takes longer than loading."""
        start, first = 0, self.first_unit
        while start < len(keys):
            some = keys[start : start + first.num_at_once]
            start += len(some)
            for key, unit in zip(some, self.here.load(some), strict=True):
                if not first.is_known:
                    first.note(unit)
                checked = unit if first.is_plain else first.checked(unit, len(key.sample_ids), self.loader.collate)
                yield pinned(checked) if self.pin_memory else checked

    def _cut(self, batch: StepSamples, units: Sequence[Positions], later_units: LaterUnits | None) -> Iterator[Batch]:
        """Load and collate the whole effective batch, and yield its units."""
        key = UnitKey(batch.start.epoch, tuple(batch.sample_ids))
        later = iter(()) if later_units is None else self.walk.step_keys_from(batch.end)
        if self.ahead is None:
            (whole,) = self._loaded_here([key])
        else:
            whole = self.ahead.take(key, lambda: itertools.chain([key], later))
            whole = checked_rows(whole, len(key.sample_ids), self.loader.collate)
        for positions in units:
            yield pick_samples(whole, positions)

    def _onward(
        self, keys: Sequence[UnitKey], index: int, batch: StepSamples, later_units: LaterUnits | None
    ) -> Iterator[UnitKey]:
        """Return the remaining keys of a batch, then the keys of later batches."""
        if later_units is None:
            return iter(keys[index:])
        later = self.walk.unit_keys_from(batch.end, later_units, packed=batch.packed)
        return itertools.chain(keys[index:], later)


def _unit_keys(
    epoch: int, sample_ids: Sequence[int], units: Sequence[Positions], *, packed: bool | None
) -> list[UnitKey]:
    return [UnitKey(epoch, tuple(taken(sample_ids, positions)), bool(packed)) for positions in units]


def _check_schedule(schedule: SampleSchedule) -> None:
    num_samples, size = schedule.num_samples, schedule.options.effective_batch_size
    if isinstance(size, BatchRamp) and num_samples:
        _check_stages(size, num_samples)
        return
    if num_samples == 0:
        message = "the data set is empty: len(dataset)=0, and a step needs at least 1 sample. Check its source."
        raise DataError(message, code="empty")
    if schedule.steps_per_epoch == 0:
        message = (
            f"drop_last=True leaves nothing: the data set has {num_samples} samples, "
            f"effective_batch_size={size} needs {size}. Use drop_last=False, or at most {num_samples}."
        )
        raise DataError(message, code="no_full_batch")


def _check_stages(ramp: BatchRamp, num_samples: int) -> None:
    # A single size may exceed the data set: each step is then the whole epoch. A stage would silently never begin.
    for number, size in enumerate(ramp.sizes):
        if size > num_samples:
            message = (
                f"stage {number} of the ramp has steps of {size:,} samples, and the data set has {num_samples:,}: "
                f"batches do not cross epochs, so no step would ever have that many. Use at most {num_samples:,}."
            )
            raise BatchSizeError(message, code="stage_never_begins")


def _check_start(schedule: SampleSchedule, start: Position) -> None:
    if start.sample_offset > schedule.num_samples:
        message = (
            f"start.sample_offset={start.sample_offset} is larger than an epoch of {schedule.num_samples} samples. "
            "Resume with the data set that the position was saved with."
        )
        raise DataError(message, code="start_beyond_epoch")
