"""The effective batches of a data set. A batch holds sample ids; samples are loaded when the engine needs them."""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.schedules import sizes_of
from anybatch.core.token_budget import SampleLengths
from anybatch.core.tree import Batch, pick_samples
from anybatch.data.collate import KnownLengths
from anybatch.data.loading import OverEffectiveBatch, UnitKey, unit_keys
from anybatch.data.options import BatchOptions, RunRange
from anybatch.errors import DataError

_LOAD = "Samples are loaded micro-batch by micro-batch; batch.load() returns all of them, collated."


class StepSamples(NamedTuple):
    """The samples of one step, and their source. A tuple, because each step creates one, and tuples are fast.

    After the last step of an epoch, `end` is the beginning of the next epoch. `loaded` contains the samples of a stream
    by id. `packed` selects the layout of a collate function that can both pad and pack; None for other functions.
    """

    sample_ids: Sequence[int]
    start: Position
    end: Position
    source: "OpenSource"
    loaded: Mapping[int, Any] | None = None
    packed: bool | None = None


class OpenSource(ABC):
    """A reader of a data set, with its workers: `OpenIndexed` for data sets with an index, `OpenStream` for streams.

    Attributes:
        dataset: the data set.
        options: the arguments of `batches`.
        lengths: the lengths of the samples; None if `batches` has no `lengths`.
        num_samples: samples of an epoch; None for a stream.
    """

    num_samples: int | None = None

    def __init__(self, dataset: object, options: BatchOptions, lengths: KnownLengths | None) -> None:
        self.dataset = dataset
        self.options = options
        self.lengths = lengths

    def feed(self, batch: StepSamples, units: Sequence[Positions], later_units: LaterUnits | None) -> Iterator[Batch]:
        """Yield the micro-batches (units) of a batch; an `OverEffectiveBatch` collates the batch before it is split."""
        if not isinstance(self.options.collate, OverEffectiveBatch):
            keys = unit_keys(batch.start.epoch, batch.sample_ids, units, packed=batch.packed)
            for index, key in enumerate(keys):
                yield self.load(key, batch, keys[index:], later_units)
        elif units:
            key = UnitKey(batch.start.epoch, tuple(batch.sample_ids))
            collated = self.load(key, batch, [key], later_units)
            yield from (pick_samples(collated, positions) for positions in units)

    @abstractmethod
    def load(self, key: UnitKey, batch: StepSamples, keys: Sequence[UnitKey], later_units: LaterUnits | None) -> Batch:
        """Return the micro-batch of `key`. `keys` are `key` and the batch's later keys, for workers that restart."""

    @property
    def subset_digest(self) -> int | None:
        """Checksum of the indices of a `Subset`; None for a stream."""
        return None

    @abstractmethod
    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step in a range; workers prefetch within the range of the last call."""

    @abstractmethod
    def close(self) -> None:
        """Shut the workers down."""

    def digest_before(self, position: Position) -> int | None:  # noqa: ARG002 (of a data set with an index)
        """Return the checksum of an epoch's sample ids before a position; None for a stream."""
        return None

    def sampled_order(self, epoch: int) -> torch.Tensor | None:  # noqa: ARG002
        """Return the ids that a sampler has drawn in an epoch; None without a sampler."""
        return None

    def use_order(self, epoch: int, order: torch.Tensor) -> None:  # noqa: B027 (nothing to do without a sampler)
        """Use an epoch's order from a checkpoint, if there is a sampler."""


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False, kw_only=True)
class DatasetBatch:
    """One effective batch of a data set. Its samples can be loaded any number of times, all or in part, or never.

    The first use of its samples determines them: until then, an iteration without a `start` can still be moved to the
    engine's position.

    Attributes:
        seed: the seed of the run's data.
        sizes: effective batch size, or the sizes of all stages of a ramp; the last batch of an epoch may be smaller.
        number: index of the batch in its iteration, from 0 on.
        iteration: the iteration that yields the batch.
        known_samples: the samples of the batch; None if they are not determined yet.
    """

    seed: int
    sizes: tuple[int, ...]
    number: int
    iteration: "Iteration"
    known_samples: StepSamples | None

    def __repr__(self) -> str:
        """Return a description of the batch, without determining its samples."""
        if self.known_samples is None:
            span = "the engine's step decides where in the data it begins"
        else:
            start, stop = self.start.sample_offset, self.start.sample_offset + self.num_samples
            span = f"{self.num_samples} samples, {start} to {stop - 1} of epoch {self.epoch}"
        return f"Effective batch {self.number} ({span}). {_LOAD}"

    def __getitem__(self, key: object) -> NoReturn:
        """Raise an error that explains how to load the samples.

        Raises:
            DataError: always.
        """
        message = f"batch[{key!r}]: an effective batch holds sample ids, not tensors. {_LOAD}"
        raise DataError(message)

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global ids of its samples, the same on every rank."""
        return self.samples.sample_ids

    @property
    def lengths(self) -> SampleLengths | None:
        """Lengths of its samples, in the same order; None if `ab.batches` has no `lengths`."""
        samples = self.samples
        all_lengths = samples.source.lengths
        if all_lengths is None:
            return None
        lengths = all_lengths.of(samples.sample_ids, None if samples.loaded is None else samples.loaded.values())
        return lengths if samples.packed is None else lengths.in_layout(packed=samples.packed)

    @property
    def start(self) -> Position:
        """Position in the data before this batch; a run that resumes from here begins with this batch."""
        return self.samples.start

    @property
    def end(self) -> Position:
        """Position in the data after this batch; a run that resumes from here begins with the next batch."""
        return self.samples.end

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def epoch(self) -> int:
        """The epoch of the samples, from 0 on. Without `start=`, the engine's first step determines it."""
        return self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        return self.end.epoch > self.start.epoch

    @property
    def dataset(self) -> object:
        """The data set of the samples."""
        return self.iteration.dataset

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, in host memory.

        In plain PyTorch: `for unit in units: yield collate([dataset[sample_ids[i]] for i in unit])`.

        Args:
            units: for each micro-batch, the indices of its samples in `sample_ids`; a sample may be in several.
            later_units: returns this rank's units of later batches, so that workers can prefetch; None: no prefetch.
        """
        samples = self.samples
        return samples.source.feed(samples, units, later_units)

    def load(self) -> Batch:
        """Return the whole effective batch, collated in one call, in host memory, such as to print shapes.

        The engine does not need this: `step` loads the samples of each micro-batch. Without `start=`, the first batch
        of an iteration is at the beginning of the data until a step moves it to the engine's position.

        Returns:
            The result of the collate function for all samples of all ranks.
        """
        return next(iter(self.feed([range(self.num_samples)])))

    def in_layout(self, *, packed: bool) -> "DatasetBatch":
        """Return a batch of the same samples that is padded or packed; its collate function is a `PaddedOrPacked`."""
        return dataclasses.replace(self, known_samples=self.samples._replace(packed=packed))

    def resume_from(self, position: Position, *, is_resumed: bool) -> bool:
        """Move the iteration to the engine's position before its first step; this batch and later ones move too.

        An iteration that has a `start`, or was moved before, does not change.

        Args:
            position: the engine's position in this data set.
            is_resumed: True to continue at exactly this position, as after `Engine.load`; False to abandon a partly
                used epoch.

        Returns:
            False if the iteration can no longer move, because later batches have been requested already.

        Raises:
            DataError: the position is beyond the data, or the caller has already skipped the finished batches.
        """
        moved = self.iteration.moved(self, position, is_resumed=is_resumed)
        if moved is not None:
            self.known_samples = moved
        return moved is not None

    @property
    def is_whole_epoch(self) -> bool:
        """Whether the batch contains all samples of its epoch."""
        return self.ends_epoch and self.start.sample_offset == 0

    @property
    def samples(self) -> StepSamples:
        """The samples of the batch and their source; the first use determines them."""
        if self.known_samples is None:
            self.known_samples = self.iteration.samples_of(self.number)
        return self.known_samples


DatasetBatches = Generator[DatasetBatch, None, None]
"""An iterator over batches. `close()` ends the iteration early and shuts its workers down."""


class Iteration:
    """One iteration over a source. Without a `start`, it begins at the position of the first engine that trains on it.

    The first batch is not read before it is needed, so that a stream is opened only once per epoch, and in the right
    epoch. Without an engine, the iteration begins at the beginning of the data.
    """

    def __init__(self, source: OpenSource, options: BatchOptions) -> None:
        self.source = source
        self._options = options
        self._sizes = sizes_of(options.effective_batch_size)
        self._steps = source.steps(options.span)
        self._can_move = options.start is None
        self._newest = -1
        self.is_over = False
        self.dataset = source.dataset
        self.key = (source.num_samples, options.seed)

    def batches(self) -> DatasetBatches:
        """Yield the effective batches; workers are shut down when this generator ends."""
        try:
            while True:
                step: StepSamples | None = None
                # Without a start, yield the first batch unread: it exists, or reading it raises an error.
                if not (self._can_move and self._newest < 0):
                    step = next(self._steps, None)
                    if step is None:
                        return
                self._newest += 1
                batch = DatasetBatch(
                    seed=self._options.seed, sizes=self._sizes, number=self._newest, iteration=self, known_samples=step
                )
                yield batch
                if step is None and batch.known_samples is None:
                    _ = batch.start  # reads this batch, so that the next read returns the next batch
        finally:
            self.is_over = True
            self.source.close()

    def samples_of(self, number: int) -> StepSamples:
        """Read and return the samples of the newest batch."""
        assert number == self._newest, (number, self._newest)
        try:
            return next(self._steps)
        finally:
            if self.is_over:
                self.source.close()  # the loop has ended, and can no longer shut the workers down

    def moved(self, batch: DatasetBatch, position: Position, *, is_resumed: bool) -> StepSamples | None:
        """Return the samples of `batch` after moving the iteration to a position; None if it is too late to move."""
        if not self._can_move:
            return batch.samples
        start = batch.start if batch.number else Position()  # do not read the first batch
        # True for a new run, and if the caller has skipped the finished batches.
        stays = is_resumed and position in (Position(), start)
        if batch.number and is_resumed and not stays:
            message = (
                f"the loop skipped {batch.number} batches after engine.load, to {start}, but the run is at {position}. "
                "ab.batches skips finished batches automatically: do not skip any, or use ab.batches(start=...)."
            )
            raise DataError(message, code="skipped_batches")
        span = self._span_from(position, is_resumed=is_resumed)
        self._can_move = False
        if stays:
            return batch.samples
        if batch.number != self._newest:
            return None
        self._steps = self.source.steps(span)
        samples = next(itertools.islice(self._steps, batch.number, None), None)
        if samples is None:  # that epoch has no step left
            self._steps = self.source.steps(self._options.span_from(Position(span.start.epoch + 1)))
            samples = next(self._steps)
        return samples

    def _span_from(self, position: Position, *, is_resumed: bool) -> RunRange:
        """Return the range of this iteration for an engine at a position."""
        if is_resumed:
            return self._options.span_from(position, resumed=True)
        # A run of `steps` may end within an epoch, and the next run continues in that epoch. After a loop over epochs
        # that stopped early, the rest of the epoch is skipped.
        if self._options.steps is None and position.sample_offset:
            position = Position(position.epoch + 1)
        return self._options.span_from(position)
