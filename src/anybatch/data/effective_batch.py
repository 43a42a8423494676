"""The effective batch that a data set yields: ids and positions now, samples when it is fed."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from anybatch.core.batch import Placement, Position
from anybatch.core.tree import Batch


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DatasetBatch:
    """One effective batch of a data set. It may be fed any number of times, whole or in part, or not at all.

    Attributes:
        sample_ids: global ids of its samples, in the order they are cut; the same on every rank.
        seed: the seed of the run's data.
        start: where the data stands before this batch; resuming from here begins with this batch.
        end: where the data stands once a step on this batch has succeeded; resuming from here begins with the next one.
        feeder: loads this batch's units; see `feed`.
    """

    sample_ids: Sequence[int] = field(repr=False)
    seed: int
    start: Position
    end: Position
    feeder: "Callable[[DatasetBatch, Placement], Iterator[Batch]]" = field(repr=False)

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def epoch(self) -> int:
        """The epoch these samples belong to, from 0."""
        return self.start.epoch

    def feed(self, placement: Placement) -> Iterator[Batch]:
        """Yield the collated micro-batch of each unit of `placement.rank`'s share, in the plan's order, on the host.

        The plain loop: `for unit in plan.shares[rank]: yield collate([dataset[i] for i in sample_ids[unit]])`. Units of
        weight 0 are loaded too: they repeat samples.
        """
        return self.feeder(self, placement)


DatasetBatches = Generator[DatasetBatch, None, None]
"""A run over batches. `close()` ends it early, and its workers with it."""
