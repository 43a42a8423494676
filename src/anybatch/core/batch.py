"""The interface of an effective batch, independent of the source of the data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anybatch.core.splitting import BatchPlan, Cut, plan_batch
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, join_samples, slice_read
from anybatch.errors import DataError

T = TypeVar("T")
Positions = Sequence[int]
"""Positions of one unit's samples in their effective batch."""
LaterUnits = Callable[[int, SampleLengths | None], Sequence[Positions]]
"""A function from the number and lengths of a later batch's samples to this rank's units, under the current cut."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a run in its data: the epoch, and the number of its samples used so far, over all ranks."""

    epoch: int = 0
    sample_offset: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The cut, the number of ranks, and this rank.

    With a `budget` batches are cut by length, and `cut` only sets how units are dealt. `packed` chooses the layout if a
    collate function can both pad and pack.
    """

    cut: Cut
    world_size: int
    rank: int
    budget: TokenBudget | None = None
    packed: bool = False

    def plan(self, num_samples: int, lengths: SampleLengths | None = None) -> BatchPlan:
        """Return the plan of an effective batch of `num_samples` over all ranks, with lengths if known.

        Raises:
            DataError: batches are cut by length, and this one has no lengths.
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
            raise DataError(message, code="no_lengths")
        return plan_by_length(lengths, self.world_size, self.cut, self.budget)

    def units(self, num_samples: int, lengths: SampleLengths | None = None) -> list[Positions]:
        """Return the sample positions of each of this rank's units."""
        plan = self.plan(num_samples, lengths)
        return [plan.positions(unit) for unit in plan.shares[self.rank]]

    def micro_batches(self, batch: "EffectiveBatch") -> Iterator[Batch]:
        """Yield the micro-batches of this rank's share of a batch, on the host."""
        batch, lengths = self.laid_out(batch)
        return batch.feed(self.units(len(batch.sample_ids), lengths), self.units)

    def laid_out(self, batch: Any) -> tuple[Any, SampleLengths | None]:  # noqa: ANN401 (an `EffectiveBatch`)
        """Return a batch and its lengths, in the chosen layout if its collate function can pad and pack."""
        lengths = lengths_of(batch)
        if lengths is None or not lengths.either:
            return batch, lengths
        return batch.in_layout(packed=self.packed), lengths.in_layout(packed=self.packed)


def lengths_of(batch: "EffectiveBatch") -> SampleLengths | None:
    """Return the lengths of a batch's samples; None if the batch (possibly of a user's class) has none."""
    return getattr(batch, "lengths", None)


def taken(values: Sequence[T], positions: Positions) -> Sequence[T]:
    """Return the values at some positions, in this order; a range of positions (step 1) returns a slice."""
    if isinstance(positions, range):  # the usual case, and many times faster
        return values[positions.start : positions.stop]
    return [values[position] for position in positions]


class EffectiveBatch(Protocol):
    """The samples of one optimizer step, over all ranks, before they are cut. Lazy: `feed` loads them.

    A batch that can be cut by length also has `lengths`, a `SampleLengths`; if `lengths.either`, it has a method
    `in_layout(packed=)`, which returns the batch padded or packed.
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

        `later_units` is the cut of later batches, so that workers can prefetch; None to prefetch nothing.
        """
        ...


def picked(batch: Batch, lists: Sequence[Sequence[int]], *, first: int = 0) -> Iterator[Batch]:
    """Yield some samples of an in-memory batch (as `read_samples` returns it) for each list of positions.

    Consecutive positions are one slice; others are joined sample by sample, which some batch classes refuse. `first` is
    the position of the batch's first sample.
    """
    for places in lists:
        start, stop = places[0] - first, places[-1] - first + 1
        if list(places) == list(range(places[0], places[-1] + 1)):
            yield slice_read(batch, start, stop)
        else:
            yield join_samples([slice_read(batch, place - first, place - first + 1) for place in places])
