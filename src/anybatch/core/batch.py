"""The interface of an effective batch, independent of the source of the data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from anybatch.core.splitting import BatchPlan, SplitOptions, plan_batch
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, join_samples, slice_marked
from anybatch.errors import DataError

T = TypeVar("T")
Positions = Sequence[int]
"""Indices of a micro-batch's samples in the effective batch. A *unit* is a numbered micro-batch of that batch."""
LaterUnits = Callable[[int, SampleLengths | None], Sequence[Positions]]
"""Function (number of samples of a later batch, their lengths) -> the units that this rank will run of that batch."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The position of a run in its data: the epoch, and the samples of that epoch used so far, over all ranks."""

    epoch: int = 0
    sample_offset: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The options for splitting a batch into units (`split`), the number of ranks, and this rank.

    With a `budget`, batches are split by sample length, and `split` only sets how units are assigned to ranks. `packed`
    selects the layout if the collate function can both pad and pack.
    """

    split: SplitOptions
    world_size: int
    rank: int
    budget: TokenBudget | None = None
    packed: bool = False

    def plan(self, num_samples: int, lengths: SampleLengths | None = None) -> BatchPlan:
        """Return the units of every rank for an effective batch of `num_samples` samples.

        Raises:
            DataError: there is a token budget, but `lengths` is None.
            BatchSizeError: a sample exceeds the token budget, or a BatchNorm group exceeds the micro-batch size.
        """
        if self.budget is None:
            return plan_batch(num_samples, self.world_size, self.split)
        if lengths is None:
            message = (
                f"micro_batch_size=token_budget({self.budget.tokens}) needs the lengths of the samples. The batch has "
                "none: pass them with the data, ab.batches(dataset, lengths=...), or use a number of samples, "
                "micro_batch_size=16."
            )
            raise DataError(message, code="no_lengths")
        return plan_by_length(lengths, self.world_size, self.split, self.budget)

    def units(self, num_samples: int, lengths: SampleLengths | None = None) -> list[Positions]:
        """Return the sample positions of each unit of this rank."""
        plan = self.plan(num_samples, lengths)
        return [plan.positions(unit) for unit in plan.shares[self.rank]]

    def micro_batches(self, batch: "EffectiveBatch") -> Iterator[Batch]:
        """Yield this rank's micro-batches of an effective batch, in host memory."""
        batch, lengths = self.choose_layout(batch)
        return batch.feed(self.units(len(batch.sample_ids), lengths), self.units)

    def choose_layout(self, batch: Any) -> tuple[Any, SampleLengths | None]:  # noqa: ANN401 (an `EffectiveBatch`)
        """Return a batch and its lengths; if the collate function can pad and pack, in the layout of `packed`."""
        lengths = lengths_of(batch)
        if lengths is None or not lengths.has_both_layouts:
            return batch, lengths
        return batch.in_layout(packed=self.packed), lengths.in_layout(packed=self.packed)


def lengths_of(batch: "EffectiveBatch") -> SampleLengths | None:
    """Return the lengths of a batch's samples; None for a loaded batch, which may have any field of this name."""
    return getattr(batch, "lengths", None) if hasattr(type(batch), "feed") else None


def select(values: Sequence[T], positions: Positions) -> Sequence[T]:
    """Return the values at the given positions, in their order; for a range of positions (step 1) return a slice."""
    if isinstance(positions, range):  # the usual case, and many times faster
        return values[positions.start : positions.stop]
    return [values[position] for position in positions]


class EffectiveBatch(Protocol):
    """The samples of one optimizer step, over all ranks, before the split. Lazy: `feed` loads and collates them.

    A batch that can be split by length also has `lengths`, a `SampleLengths`. If `lengths.has_both_layouts`, the batch
    also has a method `in_layout(packed=)`, which returns the batch padded or packed.
    """

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global sample ids, in the order of the batch."""
        ...

    @property
    def seed(self) -> int:
        """The seed of all random numbers of the batch (dropout, augmentation)."""
        ...

    @property
    def end(self) -> Position:
        """Position in the data after a step on this batch."""
        ...

    def feed(self, units: Sequence[Positions], later_units: LaterUnits | None = None) -> Iterator[Batch]:
        """Yield one collated micro-batch for each unit, in this order, in host memory.

        `later_units` returns this rank's units of later batches, so that workers can prefetch them; None: no prefetch.
        """
        ...


def select_each(batch: Batch, lists: Sequence[Sequence[int]], *, first: int = 0) -> Iterator[Batch]:
    """For each list of positions, yield these samples of an in-memory batch (as `mark_and_count` returns it).

    Consecutive positions give one slice. Other positions are sliced one by one and joined, which some batch classes do
    not support. `first` is the position of the batch's first sample.
    """
    for positions in lists:
        start, stop = positions[0] - first, positions[-1] - first + 1
        if list(positions) == list(range(positions[0], positions[-1] + 1)):
            yield slice_marked(batch, start, stop)
        else:
            yield join_samples([slice_marked(batch, at - first, at - first + 1) for at in positions])
