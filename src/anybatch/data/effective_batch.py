"""The effective batch that a data set yields: ids and positions now, samples when it is fed."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from anybatch.core.batch import Foresight, Position, Positions
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
    feeder: "Callable[[DatasetBatch, Sequence[Positions], Foresight | None], Iterator[Batch]]" = field(repr=False)

    @property
    def num_samples(self) -> int:
        """Number of samples over all ranks."""
        return len(self.sample_ids)

    @property
    def epoch(self) -> int:
        """The epoch these samples belong to, from 0."""
        return self.start.epoch

    def feed(self, units: Sequence[Positions], foresight: Foresight | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, on the host.

        The plain loop: `for unit in units: yield collate([dataset[sample_ids[i]] for i in unit])`.

        Args:
            units: the positions in `sample_ids` of the samples of each micro-batch; a sample may be in several.
            foresight: how later batches will be cut, so that workers can load ahead; None: they load nothing of these.
        """
        return self.feeder(self, units, foresight)


DatasetBatches = Generator[DatasetBatch, None, None]
"""A run over batches. `close()` ends it early, and its workers with it."""
