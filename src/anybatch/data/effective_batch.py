"""The effective batch that a data set yields: ids and positions now, samples when it is fed."""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, NoReturn, Protocol

import torch

from anybatch.core.batch import LaterUnits, Position, Positions
from anybatch.core.token_budget import SampleLengths
from anybatch.core.tree import Batch
from anybatch.data.options import RunRange
from anybatch.errors import DataError

_LOAD = "Samples are loaded micro-batch by micro-batch; batch.load() returns all of them, collated."


def _no_lengths(sample_ids: Sequence[int]) -> None:  # noqa: ARG001 (nobody has said how long they are)
    return None


class StepSamples(NamedTuple):
    """Which samples make one step, and what loads them. A tuple, since each step makes one.

    Attributes:
        sample_ids: global ids, the same on every rank.
        start: where the data stands before this step.
        end: where it stands after it; the next epoch's beginning after the last step of an epoch.
        feeder: loads units of it.
        find_lengths: from sample ids to their lengths; to None where nobody has said.
        packed: whether they are packed, if their collate function can pad and pack; it pads where nobody has said.
    """

    sample_ids: Sequence[int]
    start: Position
    end: Position
    feeder: "Callable[[StepSamples, Sequence[Positions], LaterUnits | None], Iterator[Batch]]"
    find_lengths: Callable[[Sequence[int]], SampleLengths | None] = _no_lengths
    packed: bool | None = None

    @property
    def lengths(self) -> SampleLengths | None:
        """Lengths of the samples, in the layout that was chosen, if one was; None where nobody has said."""
        found = self.find_lengths(self.sample_ids)
        return found if found is None or self.packed is None else found.in_layout(packed=self.packed)


class OpenSource(Protocol):
    """A source that is being read, with its workers.

    Attributes:
        dataset: the user's data set.
        num_samples: samples of an epoch; None for a stream.
        subset_digest: checksum of the indices of a subset; None for a stream.
    """

    @property
    def dataset(self) -> object: ...  # noqa: D102

    @property
    def num_samples(self) -> int | None: ...  # noqa: D102

    @property
    def subset_digest(self) -> int | None: ...  # noqa: D102

    def digest_before(self, position: Position) -> int | None:
        """Return the checksum of the ids of an epoch up to a position; None for a stream."""

    def sampled_order(self, epoch: int) -> torch.Tensor | None:
        """Return the ids that a sampler has drawn in an epoch; None without a sampler."""

    def use_order(self, epoch: int, order: torch.Tensor) -> None:
        """Take the order of an epoch from a checkpoint, where there is a sampler."""

    def steps(self, span: RunRange) -> Iterator[StepSamples]:
        """Yield the samples of each step of a span. The last call counts: workers look ahead in its span."""

    def close(self) -> None:
        """Shut the workers down."""


class BatchIteration(Protocol):
    """The iteration that a batch is from. It finds the batch's samples, and may begin elsewhere.

    Attributes:
        dataset: the data set it iterates.
        key: number of samples of the data set and seed of the data; identifies the data set in a checkpoint.
        source: the data set, open for reading.
        is_over: whether no more batches will be taken from it.
    """

    dataset: object
    key: tuple[int | None, int]
    source: OpenSource
    is_over: bool

    def samples_of(self, number: int) -> StepSamples:
        """Return what is in batch `number`, the newest, which has not been looked into yet."""

    def moved(self, batch: "DatasetBatch", position: Position, *, is_resumed: bool) -> StepSamples | None:
        """Go on from where an engine stands; see `DatasetBatch.go_on_from`."""


class DatasetBatch:
    """One effective batch of a data set. It may be fed any number of times, whole or in part, or not at all.

    What is in it is found out when it is asked for: until then an iteration without a `start` of its own can still be
    told to begin elsewhere.

    Args:
        seed: the seed of the run's data.
        sizes: samples of a step as they were asked for, one or the stages of a ramp; the last batch of an epoch may
            hold less.
        number: of the batch in its iteration, from 0.
        iteration: the iteration.
        samples: what is in it, if that is known.
    """

    __slots__ = ("__weakref__", "_samples", "iteration", "number", "seed", "sizes")

    def __init__(
        self, *, seed: int, sizes: tuple[int, ...], number: int, iteration: BatchIteration, samples: StepSamples | None
    ) -> None:
        self.seed = seed
        self.sizes = sizes
        self.number = number
        self.iteration = iteration
        self._samples = samples

    def __repr__(self) -> str:
        """Return the batch in a paragraph, without finding out its samples if nobody has asked for them."""
        if self._samples is None:
            place = "the engine's step decides where in the data it begins"
        else:
            start, stop = self.start.sample_offset, self.start.sample_offset + self.num_samples
            place = f"{self.num_samples} samples, {start} to {stop - 1} of epoch {self.epoch}"
        return f"Effective batch {self.number} ({place}). {_LOAD}"

    def __getitem__(self, key: object) -> NoReturn:
        """Refuse to be read like a loaded batch.

        Raises:
            DataError: names `load`.
        """
        message = f"batch[{key!r}]: an effective batch holds sample ids, not tensors. {_LOAD}"
        raise DataError(message)

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global ids of its samples, the same on every rank."""
        return self.samples.sample_ids

    @property
    def lengths(self) -> SampleLengths | None:
        """Lengths of its samples, in the same order; None if `ab.batches` was not given any."""
        return self.samples.lengths

    @property
    def start(self) -> Position:
        """Where the data stands before this batch; resuming from here begins with this batch."""
        return self.samples.start

    @property
    def end(self) -> Position:
        """Where the data stands once a step on this batch has succeeded; resuming from here begins with the next."""
        return self.samples.end

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def epoch(self) -> int:
        """The epoch these samples belong to, from 0. Without `start=` it is settled by the engine's step."""
        return self.start.epoch

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        return self.end.epoch > self.start.epoch

    @property
    def dataset(self) -> object:
        """The data set it is of."""
        return self.iteration.dataset

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, on the host.

        The plain loop: `for unit in units: yield collate([dataset[sample_ids[i]] for i in unit])`.

        Args:
            units: the positions in `sample_ids` of the samples of each micro-batch; a sample may be in several.
            later_units: how later batches will be cut, so that workers can load ahead; None: they load none of these.
        """
        samples = self.samples
        return samples.feeder(samples, units, later_units)

    def load(self) -> Batch:
        """Return the whole effective batch, collated in one piece, on the host: to print shapes or to draw images.

        The engine does not need it: `step` loads the samples of each micro-batch itself. Without `start=` the place of
        the first batch of an iteration is the data's beginning until a step moves it to where the engine stands.

        Returns:
            What the collate function returns for all samples of all ranks.
        """
        return next(iter(self.feed([range(self.num_samples)])))

    def in_layout(self, *, packed: bool) -> "DatasetBatch":
        """Return the same samples padded or packed, where the collate function is a `PaddedOrPacked`."""
        samples = self.samples._replace(packed=packed)
        return DatasetBatch(
            seed=self.seed, sizes=self.sizes, number=self.number, iteration=self.iteration, samples=samples
        )

    def go_on_from(self, position: Position, *, is_resumed: bool) -> bool:
        """Tell the iteration, before its first step, where the engine stands; this batch and later ones follow.

        Nothing happens to an iteration with a `start` of its own, or that has been told before.

        Args:
            position: of the engine in this data set.
            is_resumed: whether data continue at exactly this position, as after `Engine.load`; otherwise an epoch that
                was left in the middle is over.

        Returns:
            False if it had to begin elsewhere and cannot any more, because later batches have been taken already.

        Raises:
            DataError: the position lies beyond the data, or finished batches have been skipped by hand as well.
        """
        moved = self.iteration.moved(self, position, is_resumed=is_resumed)
        if moved is not None:
            self._samples = moved
        return moved is not None

    @property
    def is_whole_epoch(self) -> bool:
        """Whether it holds all samples of its epoch."""
        return self.ends_epoch and self.start.sample_offset == 0

    @property
    def is_known(self) -> bool:
        """Whether what is in it has been asked for."""
        return self._samples is not None

    @property
    def samples(self) -> StepSamples:
        """Which samples it holds, and what loads them; looks into the batch."""
        if self._samples is None:
            self._samples = self.iteration.samples_of(self.number)
        return self._samples


DatasetBatches = Generator[DatasetBatch, None, None]
"""A run over batches. `close()` ends it early, and its workers with it."""
