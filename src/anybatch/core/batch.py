"""Chapter 5: what the engine asks of an effective batch, whatever data it comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.tree import Batch

T = TypeVar("T")
Positions = Sequence[int]
"""Where the samples of one unit stand in their effective batch."""
Foresight = Callable[[Sequence[int]], Sequence[Positions]]
"""From the sample ids of a later batch to the units that this rank will ask for, if the cut stays as it is."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a run stands in its data: the epoch, and how many samples of it have made a step, over all ranks."""

    epoch: int = 0
    sample_offset: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """How batches are cut, over how many ranks they are dealt, and which of those ranks this one is."""

    cut: Cut
    world_size: int
    rank: int

    def plan(self, sample_ids: Sequence[int]) -> BatchPlan:
        """Return the plan of an effective batch of these samples."""
        plan = plan_batch(len(sample_ids), self.world_size, self.cut)
        return plan if self.cut.order is None else plan.in_order(self.cut.order(sample_ids))

    def units(self, sample_ids: Sequence[int]) -> list[Positions]:
        """Return the positions of each of this rank's units of such a batch."""
        plan = self.plan(sample_ids)
        return [plan.positions(unit) for unit in plan.shares[self.rank]]

    def micro_batches(self, batch: "EffectiveBatch") -> Iterator[Batch]:
        """Yield the micro-batches of this rank's share of a batch, on the host."""
        return batch.feed(self.units(batch.sample_ids), self.units)


def taken(values: Sequence[T], positions: Positions) -> Sequence[T]:
    """Return the values at some positions, in the order of these.

    Args:
        values: any sequence; of a range of positions a slice of it is returned.
        positions: from 0 on; a range counts up by one.
    """
    if isinstance(positions, range):  # nearly always: a slice is many times faster
        return values[positions.start : positions.stop]
    return [values[position] for position in positions]


class EffectiveBatch(Protocol):
    """The samples of one optimizer step, over all ranks, before they are cut. Lazy: they are loaded when they are fed.

    Attributes:
        sample_ids: global ids of its samples, in the order they are cut; the same on every rank.
        seed: the seed of the run's data, the first word of every random key.
        end: where the data stands once a step on this batch has succeeded.
    """

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global ids, in the order they are cut."""
        ...

    @property
    def seed(self) -> int:
        """First word of every random key."""
        ...

    @property
    def end(self) -> Position:
        """Position after a step on this batch."""
        ...

    def feed(self, units: Sequence[Positions], foresight: Foresight | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, on the host.

        Args:
            units: the positions in `sample_ids` of the samples of each micro-batch.
            foresight: how later batches will be cut, so that workers can load ahead; None: they load nothing of these.
        """
        ...
