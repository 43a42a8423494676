"""Chapter 5: what the engine asks of an effective batch, whatever data it comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, join_samples, slice_read
from anybatch.errors import DataError

T = TypeVar("T")
Positions = Sequence[int]
"""Where the samples of one unit stand in their effective batch."""
LaterUnits = Callable[[int, SampleLengths | None], Sequence[Positions]]
"""From the number and lengths of a later batch's samples to the units that this rank will ask for, as batches are cut
now."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """Where a run stands in its data: the epoch, and how many samples of it have made a step, over all ranks."""

    epoch: int = 0
    sample_offset: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """How batches are cut, over how many ranks they are dealt, and which of those ranks this one is.

    Attributes:
        cut: by numbers of samples.
        world_size: number of ranks.
        rank: this one.
        budget: cuts by length instead, with `cut` saying how units are dealt; None for by samples.
        packed: batches whose collate function can pad and pack are packed.
    """

    cut: Cut
    world_size: int
    rank: int
    budget: TokenBudget | None = None
    packed: bool = False

    def plan(self, num_samples: int, lengths: SampleLengths | None = None) -> BatchPlan:
        """Return the plan of an effective batch.

        Args:
            num_samples: of the batch, over all ranks.
            lengths: of these samples; None where nobody has said.

        Raises:
            DataError: batches are cut by length, and this one has none.
            BatchSizeError: a sample, or a group, does not fit into a micro-batch.
        """
        if self.budget is None:
            return plan_batch(num_samples, self.world_size, self.cut)
        if lengths is None:
            message = (
                f"micro_batch_size=token_budget({self.budget.tokens}) cuts by length, and the batch does not say how "
                "long its samples are. Give lengths with the data, ab.batches(dataset, lengths=...), or cut by number: "
                "micro_batch_size=16."
            )
            raise DataError(message)
        return plan_by_length(lengths, self.world_size, self.cut, self.budget)

    def units(self, num_samples: int, lengths: SampleLengths | None = None) -> list[Positions]:
        """Return the positions of each of this rank's units of such a batch."""
        plan = self.plan(num_samples, lengths)
        return [plan.positions(unit) for unit in plan.shares[self.rank]]

    def micro_batches(self, batch: "EffectiveBatch") -> Iterator[Batch]:
        """Yield the micro-batches of this rank's share of a batch, on the host."""
        batch, lengths = self.laid_out(batch)
        return batch.feed(self.units(len(batch.sample_ids), lengths), self.units)

    def laid_out(self, batch: Any) -> tuple[Any, SampleLengths | None]:  # noqa: ANN401 (an `EffectiveBatch`)
        """Return a batch in the chosen layout, where its collate function can pad and pack, and its lengths."""
        lengths = lengths_of(batch)
        if lengths is None or not lengths.either:
            return batch, lengths
        return batch.in_layout(packed=self.packed), lengths.in_layout(packed=self.packed)


def lengths_of(batch: "EffectiveBatch") -> SampleLengths | None:
    """Return the lengths of a batch's samples; None where the batch, which may be of a user's class, has none."""
    return getattr(batch, "lengths", None)


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
        sample_ids: global ids of its samples; the same on every rank. A batch that may be cut by length also has
            `lengths`, a `SampleLengths`; and where these say `either`, a method `in_layout(packed=)`, which returns the
            batch padded or packed.
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

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, on the host.

        Args:
            units: the positions in `sample_ids` of the samples of each micro-batch.
            later_units: how later batches will be cut, so that workers can load ahead; None: they load none of these.
        """
        ...


def picked(batch: Batch, lists: Sequence[Sequence[int]], *, first: int = 0) -> Iterator[Batch]:
    """Yield some samples of a batch that is in memory, for each list of places.

    Args:
        batch: the batch as `read_samples` returns it.
        lists: places of samples; consecutive ones are cut, and others joined, which some classes of batches refuse.
        first: place of the batch's first sample.
    """
    for places in lists:
        start, stop = places[0] - first, places[-1] - first + 1
        if list(places) == list(range(places[0], places[-1] + 1)):
            yield slice_read(batch, start, stop)
        else:
            yield join_samples([slice_read(batch, place - first, place - first + 1) for place in places])
