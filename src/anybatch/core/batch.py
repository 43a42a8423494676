"""Chapter 5: what the engine asks of an effective batch, whoever made it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.tree import Batch


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

    def plan(self, num_samples: int) -> BatchPlan:
        """Return the plan of an effective batch of `num_samples`."""
        return plan_batch(num_samples, self.world_size, self.cut)


class EffectiveBatch(Protocol):
    """What one optimizer step sees, over all ranks, before it is cut. Lazy: samples are loaded when they are fed.

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

    def feed(self, placement: Placement) -> Iterator[Batch]:
        """Yield the collated micro-batch of each unit of `placement.rank`'s share, in the plan's order, on the host.

        The plan is `placement.plan(len(self.sample_ids))`. The first feed also tells the data loader how later batches
        will be cut, so that its workers can run ahead.
        """
        ...
