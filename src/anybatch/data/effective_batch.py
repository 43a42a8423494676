"""The effective batch that a data set yields: ids and positions now, samples when it is fed."""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch

from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.token_budget import SampleLengths
from anybatch.core.tree import Batch
from anybatch.data.options import BatchOptions, RunRange
from anybatch.errors import DataError

_LOAD = "Samples are loaded micro-batch by micro-batch; batch.load() returns all of them, collated."


class StepSamples(NamedTuple):
    """The samples of one step, and their loader. A tuple for speed, since each step makes one.

    `end` is the next epoch's beginning after the last step of an epoch. `packed` is None unless their collate function
    can both pad and pack.
    """

    sample_ids: Sequence[int]
    start: Position
    end: Position
    feeder: "Callable[[StepSamples, Sequence[Positions], LaterUnits | None], Iterator[Batch]]"
    find_lengths: Callable[[Sequence[int]], SampleLengths | None] | None = None
    packed: bool | None = None

    @property
    def lengths(self) -> SampleLengths | None:
        """Lengths of the samples, in the chosen layout, if any; None if unknown."""
        found = None if self.find_lengths is None else self.find_lengths(self.sample_ids)
        return found if found is None or self.packed is None else found.in_layout(packed=self.packed)


class OpenSource(Protocol):
    """A source that is being read, with its workers; a stream has no number of samples and no digest."""

    @property
    def dataset(self) -> object: ...  # noqa: D102

    @property
    def num_samples(self) -> int | None: ...  # noqa: D102

    @property
    def subset_digest(self) -> int | None: ...  # noqa: D102

    def digest_before(self, position: Position) -> int | None:
        """Return the checksum of the ids of an epoch before a position; None for a stream."""

    def sampled_order(self, epoch: int) -> torch.Tensor | None:
        """Return the ids that a sampler has drawn in an epoch; None without a sampler."""

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Use an epoch's order from a checkpoint, if there is a sampler."""

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step of a span; workers prefetch within the span of the last call."""

    def close(self) -> None:
        """Shut the workers down."""


class DatasetBatch:
    """One effective batch of a data set. It may be fed any number of times, whole or in part, or never.

    Its samples are determined on first use: until then an iteration without a `start` can still be moved to another
    position.

    Args:
        seed: the seed of the run's data.
        sizes: requested samples of a step, one or the stages of a ramp; the last batch of an epoch may be smaller.
        number: index of the batch in its iteration, from 0.
        iteration: the iteration.
        samples: its samples, if known.
    """

    __slots__ = ("__weakref__", "_samples", "iteration", "number", "seed", "sizes")

    def __init__(
        self, *, seed: int, sizes: tuple[int, ...], number: int, iteration: "Iteration", samples: StepSamples | None
    ) -> None:
        self.seed = seed
        self.sizes = sizes
        self.number = number
        self.iteration = iteration
        self._samples = samples

    def __repr__(self) -> str:
        """Return the batch as a paragraph, without determining its samples."""
        if self._samples is None:
            place = "the engine's step decides where in the data it begins"
        else:
            start, stop = self.start.sample_offset, self.start.sample_offset + self.num_samples
            place = f"{self.num_samples} samples, {start} to {stop - 1} of epoch {self.epoch}"
        return f"Effective batch {self.number} ({place}). {_LOAD}"

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse an access as to a loaded batch, with an error that names `load`.

        Raises:
            DataError: always.
        """
        message = f"batch[{key!r}]: an effective batch holds sample ids, not tensors. {_LOAD}"
        raise DataError(message)

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global ids of its samples, the same on every rank."""
        return (self._samples or self.samples).sample_ids

    @property
    def lengths(self) -> SampleLengths | None:
        """Lengths of its samples, in the same order; None if `ab.batches` has no `lengths`."""
        samples = self._samples or self.samples
        return None if samples.find_lengths is None else samples.lengths

    @property
    def start(self) -> Position:
        """Position of the data before this batch; resuming from here begins with this batch."""
        return self.samples.start

    @property
    def end(self) -> Position:
        """Position of the data after a successful step on this batch; resuming from here begins with the next."""
        return (self._samples or self.samples).end

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def epoch(self) -> int:
        """The epoch of these samples, from 0. Without `start=` the engine's step determines it."""
        return self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        return self.end.epoch > self.start.epoch

    @property
    def dataset(self) -> object:
        """Its data set."""
        return self.iteration.dataset

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, on the host.

        The plain loop: `for unit in units: yield collate([dataset[sample_ids[i]] for i in unit])`.

        Args:
            units: the positions in `sample_ids` of the samples of each micro-batch; a sample may be in several.
            later_units: the cut of later batches, so that workers can prefetch; None to prefetch nothing.
        """
        samples = self._samples or self.samples
        return samples.feeder(samples, units, later_units)

    def load(self) -> Batch:
        """Return the whole effective batch, collated in one piece, on the host: to print shapes or to draw images.

        The engine does not need it: `step` loads the samples of each micro-batch itself. Without `start=` the first
        batch of an iteration is at the data's beginning until a step moves it to the engine's position.

        Returns:
            The result of the collate function for all samples of all ranks.
        """
        return next(iter(self.feed([range(self.num_samples)])))

    def in_layout(self, *, packed: bool) -> "DatasetBatch":
        """Return the same samples padded or packed, if the collate function is a `PaddedOrPacked`."""
        samples = self.samples._replace(packed=packed)
        return DatasetBatch(
            seed=self.seed, sizes=self.sizes, number=self.number, iteration=self.iteration, samples=samples
        )

    def resume_from(self, position: Position, *, is_resumed: bool) -> bool:
        """Move the iteration, before its first step, to the engine's position; this batch and later ones follow.

        An iteration that has a `start`, or was moved before, does not change.

        Args:
            position: the engine's position in this data set.
            is_resumed: whether the data continue at exactly this position, as after `Engine.load`; otherwise a partly
                used epoch is abandoned.

        Returns:
            False if the iteration can no longer move, because later batches have been requested already.

        Raises:
            DataError: the position is beyond the data, or the caller skipped finished batches too.
        """
        moved = self.iteration.moved(self, position, is_resumed=is_resumed)
        if moved is not None:
            self._samples = moved
        return moved is not None

    @property
    def is_whole_epoch(self) -> bool:
        """Whether it contains all samples of its epoch."""
        return self.ends_epoch and self.start.sample_offset == 0

    @property
    def is_known(self) -> bool:
        """Whether its samples have been determined."""
        return self._samples is not None

    @property
    def samples(self) -> StepSamples:
        """Its samples and their loader; determines them."""
        if self._samples is None:
            self._samples = self.iteration.samples_of(self.number)
        return self._samples


DatasetBatches = Generator[DatasetBatch, None, None]
"""An iteration over batches. `close()` ends it early, and its workers too."""


class Iteration:
    """One iteration over a source. Without a `start` it begins at the engine's position, set before its first step.

    Its first batch is not read before it is needed, so that a stream is opened once an epoch, and in the right epoch.
    If no engine sets a position, it begins at the beginning.
    """

    def __init__(self, source: OpenSource, request: BatchOptions) -> None:
        self.source = source
        self._request = request
        self._sizes = request.sizes
        self._steps = source.steps(request.span)
        self._can_move = request.start is None
        self._newest = -1
        self.is_over = False
        self.dataset = source.dataset
        self.key = (source.num_samples, request.seed)

    def batches(self) -> DatasetBatches:
        """Yield the effective batches; workers stop when this generator does."""
        try:
            while True:
                known: StepSamples | None = None
                # Without a start the first batch exists, or reading it raises: yield it without reading.
                if not (self._can_move and self._newest < 0):
                    known = next(self._steps, None)
                    if known is None:
                        return
                self._newest += 1
                batch = DatasetBatch(
                    seed=self._request.seed, sizes=self._sizes, number=self._newest, iteration=self, samples=known
                )
                yield batch
                if known is None and not batch.is_known:
                    _ = batch.start  # determines the batch: the next read is after it
        finally:
            self.is_over = True
            self.source.close()

    def samples_of(self, number: int) -> StepSamples:
        """Return the samples of the newest batch, which has not been read yet."""
        assert number == self._newest, (number, self._newest)
        try:
            return next(self._steps)
        finally:
            if self.is_over:
                self.source.close()  # the batch is used after its loop, which can no longer stop its workers

    def moved(self, batch: DatasetBatch, position: Position, *, is_resumed: bool) -> StepSamples | None:
        """Return the samples of a batch for a known engine position; None if it is too late to move."""
        if not self._can_move:
            return batch.samples
        start = batch.start if batch.number else Position()  # known without reading the first batch
        # A new run, or the caller has skipped finished batches.
        stays = is_resumed and position in (Position(), start)
        span, num_skipped = self._span_from(position, is_resumed=is_resumed), batch.number
        if num_skipped and is_resumed and not stays:
            num_skipped = _num_to_skip(batch.number, start, position)
        self._can_move = False
        if stays:
            return batch.samples
        if batch.number != self._newest:
            return None
        self._steps = self.source.steps(span)
        found = next(itertools.islice(self._steps, num_skipped, None), None)
        if found is None:  # that epoch has no step left
            self._steps = self.source.steps(self._request.span_from(Position(span.start.epoch + 1)))
            found = next(self._steps)
        return found

    def _span_from(self, position: Position, *, is_resumed: bool) -> RunRange:
        """Return the range of this iteration for an engine at a position."""
        if is_resumed:
            return self._request.span_from(position, resumed=True)
        # A run of `steps` may end within an epoch, and the next run continues there. A loop over epochs that stopped
        # early does not: the rest of its epoch is skipped.
        if self._request.steps is None and position.sample_offset:
            position = Position(position.epoch + 1)
        return self._request.span_from(position)


def _num_to_skip(number: int, start: Position, position: Position) -> int:
    """Return the number of batches to skip after a position, if the caller has skipped the first `number` batches.

    `start` is the end of the skipped batches, counted from the beginning; `position` is the resumed run's position.
    Raises a `DataError` if the skipped batches are not clearly the ones finished before the resume.
    """
    if position.sample_offset and start == Position(0, position.sample_offset):
        return 0  # the finished batches of this epoch
    if not position.sample_offset and start.epoch == 0:
        return number  # the first batches of every epoch
    message = (
        f"{number} batches were skipped after engine.load, up to {start}, and the run is at {position}: ab.batches "
        "skips finished batches itself. Iterate it from its beginning, or set its start with ab.batches(start=...)."
    )
    raise DataError(message)
