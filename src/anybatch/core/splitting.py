"""Split an effective batch into numbered micro-batches (*units*), and assign (*deal*) them to ranks.

A unit is a range of positions in the effective batch's global order; a *rank share* is the list of units of one rank.
No sample is dropped or duplicated: the units with weight 1 partition the batch.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from anybatch.core.compatibility import Feature, check_combinations
from anybatch.core.geometry import ceil_div
from anybatch.errors import BatchSizeError

Deal = Literal["balanced", "fixed"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A numbered micro-batch: positions `start` to `stop` (exclusive) of the effective batch.

    `weight` is 1, or 0 for a *filler*, which only keeps ranks in lockstep: it repeats samples and adds to no sum.
    """

    number: int
    start: int
    stop: int
    weight: float = 1.0

    @property
    def num_samples(self) -> int:
        """Number of samples in this unit."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """Options for splitting an effective batch into units (micro-batches).

    Args:
        micro_batch_size: maximum samples in a unit; None for no limit.
        accumulation_steps: split each share into this number of units of nearly equal size; None for as few units as
            `micro_batch_size` allows.
        deal: "balanced" gives ranks numbers of samples that differ by at most one, and splits each share separately;
            "fixed" splits the whole batch once and assigns whole units, which then do not depend on the world size.
        lockstep: every rank must run the same number of units; short shares are padded with units of weight 0.
        group: units and shares hold whole groups of this many consecutive samples, see `group_sizes`. A unit may exceed
            `micro_batch_size` by one sample, because the last group may have one sample more than the others.
        min_samples: minimum samples of a unit; units of equal size are used if a unit would be smaller otherwise.
    """

    micro_batch_size: int | None = None
    accumulation_steps: int | None = None
    deal: Deal = "balanced"
    lockstep: bool = False
    group: int | None = None
    min_samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitConstraints:
    """Requirements of a strategy or a BatchNorm policy (`norms=`) on units, and on how they are run.

    Attributes:
        lockstep: every rank runs the same number of units, and has at least one unit with samples in every step.
        allows_empty_ranks: like `lockstep`, but a rank may have no samples in a step; it then runs only fillers.
        group: units and rank shares hold whole groups of this many consecutive samples; None for no groups.
    """

    lockstep: bool = False
    allows_empty_ranks: bool = False
    every_unit: bool = False  # units without any item of the loss, such as a token with a label, are run too
    whole: bool = False  # a rank share is one unit, regardless of its size
    group: int | None = None
    min_samples: int = 1  # minimum samples of a unit, if units of equal size can reach it
    syncs_in_forward: bool = False  # ranks wait for each other in the middle of a forward
    why_largest: str = ""  # why "auto" takes the largest micro-batch that fits (as text); empty: it takes the fastest

    @property
    def searchable(self) -> bool:
        """Whether "auto" can search for a size: false if a share is one unit, or all units are in memory together."""
        return not (self.whole or self.every_unit)

    def __or__(self, other: "SplitConstraints") -> "SplitConstraints":
        """Return constraints that satisfy both; only one of them may have a group size."""
        assert self.group is None or other.group is None, (self, other)
        return SplitConstraints(
            lockstep=self.lockstep or other.lockstep,
            allows_empty_ranks=self.allows_empty_ranks or other.allows_empty_ranks,
            every_unit=self.every_unit or other.every_unit,
            whole=self.whole or other.whole,
            group=other.group if self.group is None else self.group,
            min_samples=max(self.min_samples, other.min_samples),
            syncs_in_forward=self.syncs_in_forward or other.syncs_in_forward,
            why_largest=self.why_largest or other.why_largest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The units of each rank for one effective batch: a plain value to print, compare or test without a device.

    Attributes:
        order: a permutation of the batch's positions; a unit is a range of it. None: a unit is a range of the batch.
    """

    num_samples: int  # samples of the effective batch over all ranks
    shares: tuple[tuple[Unit, ...], ...]  # for each rank its units, in the order in which they run
    split: SplitOptions  # the options that the plan follows
    order: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.shares)

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units with weight 1 (no fillers), in global order."""
        return tuple(unit for share in self.shares for unit in share if unit.weight)

    @property
    def accumulation_steps(self) -> int:
        """The maximum number of micro-batches per rank."""
        return max(len(share) for share in self.shares)

    def positions(self, unit: Unit) -> Sequence[int]:
        """Return the positions of a unit's samples in the batch."""
        if self.order is None:
            return range(unit.start, unit.stop)
        return self.order[unit.start : unit.stop]

    def __str__(self) -> str:
        """Return the sizes in one line: `256 samples = 2 ranks x 8 micro-batches x 16`."""
        sizes = [tuple(unit.num_samples for unit in share if unit.weight) for share in self.shares]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        largest = max((size for share in sizes for size in share), default=0)
        steps = max(len(share) for share in sizes)
        samples = f"{self.num_samples} sample{'s' * (self.num_samples != 1)}"
        line = f"{samples} = {ranks} x {steps} micro-batch{'es' * (steps != 1)} x {largest}"
        if all(share == (largest,) * steps for share in sizes):
            return line
        if self.order is not None:  # split by length: every plan differs, so its sizes are not listed
            return f"{line}, split by length: {min(size for share in sizes for size in share)} to {largest}"
        return f"{line}, ragged: {_describe_ragged(sizes)}"


@functools.lru_cache(maxsize=8)  # nearly all steps of a run have the same plan
def plan_batch(num_samples: int, world_size: int, split: SplitOptions) -> BatchPlan:
    """Split an effective batch of any size into units, and assign them to `world_size` ranks."""
    if num_samples < 0:
        message = f"{num_samples=} must not be negative."
        raise BatchSizeError(message, code="negative_size")
    if split.deal == "balanced":
        return plan_shares(_even_shares(num_samples, world_size, split), split)
    if split.accumulation_steps is not None:
        sizes: Iterable[int] = _even_shares(num_samples, world_size * split.accumulation_steps, split, keep_empty=False)
    else:
        # Without a micro-batch size a unit is a whole rank share, of at least one group.
        share = max(ceil_div(num_samples, world_size), split.group or 1)
        sizes = _units_of(num_samples, split.micro_batch_size or share, split)
    units = [Unit(number, start, stop) for number, (start, stop) in enumerate(_ranges(sizes, 0))]
    # Assign whole units, so that the units do not depend on the world size; ranks may then differ by one unit.
    ends = list(itertools.accumulate(even_parts(len(units), world_size), initial=0))
    shares = tuple(tuple(units[start:stop]) for start, stop in itertools.pairwise(ends))
    return plan_of(num_samples, shares, split)


@functools.lru_cache(maxsize=8)
def plan_shares(share_sizes: tuple[int, ...], split: SplitOptions) -> BatchPlan:
    """Split a batch that is already divided over ranks: rank r has `share_sizes[r]` consecutive samples.

    Raises:
        CompositionError: `split.deal` is "fixed", which needs a batch whose samples can go to any rank.
        BatchSizeError: a share ends within a group.
    """
    if split.deal == "fixed":
        check_combinations({Feature.FIXED: "", Feature.RANK_SHARES: ""})
    _check_groups(share_sizes, split)
    shares: list[tuple[Unit, ...]] = []
    number = start = 0
    for size in share_sizes:
        # Split each share separately: no unit may contain samples of two ranks.
        if split.accumulation_steps is not None:
            sizes: Iterable[int] = _even_shares(size, split.accumulation_steps, split, keep_empty=False)
        else:
            sizes = _units_of(size, split.micro_batch_size or size, split)
        share = tuple(Unit(number + k, *bounds) for k, bounds in enumerate(_ranges(sizes, start)))
        shares.append(share)
        number += len(share)
        start += size
    return plan_of(start, tuple(shares), split)


def group_sizes(num_samples: int, group: int) -> tuple[int, ...]:
    """Split samples into groups of `group`: 10 = 4 + 4 + 2, but 9 = 4 + 5, since no group may have a single sample."""
    sizes = _parts_of(num_samples, group)
    # One value has no variance, and BatchNorm in train mode refuses it.
    if len(sizes) > 1 and sizes[-1] == 1:
        return (*sizes[:-2], group + 1)
    return sizes


def even_parts(total: int, num_parts: int) -> tuple[int, ...]:
    """Split `total` into `num_parts` whole numbers that differ by at most one, larger ones first."""
    if num_parts == 0:
        return ()
    quotient, rest = divmod(total, num_parts)
    return (quotient + 1,) * rest + (quotient,) * (num_parts - rest)


def _parts_of(total: int, size: int) -> tuple[int, ...]:
    """Split `total` into parts of `size`, the last one possibly smaller."""
    if total == 0:
        return ()
    full, rest = divmod(total, size)
    return (size,) * full + ((rest,) if rest else ())


def _even_shares(num_samples: int, num_parts: int, split: SplitOptions, *, keep_empty: bool = True) -> tuple[int, ...]:
    """Split samples into parts that differ by at most one sample, or by one group if there is a group size."""
    groups = None if split.group is None else group_sizes(num_samples, split.group)
    num_pieces = num_samples if groups is None else len(groups)
    # A rank may have no samples, but a unit has at least one.
    parts = even_parts(num_pieces, num_parts if keep_empty else min(num_parts, num_pieces))
    if groups is None:
        return parts
    return tuple(sum(groups[start:stop]) for start, stop in _ranges(parts, 0))


def _units_of(num_samples: int, size: int, split: SplitOptions) -> tuple[int, ...]:
    """Split samples into units of at most `size`, made of whole groups; refuse a group that does not fit."""
    if split.group is None:
        parts = _parts_of(num_samples, size)
        # One value has no variance: 4 + 4 + 1 becomes 3 + 3 + 3.
        return parts if not parts or parts[-1] >= split.min_samples else even_parts(num_samples, len(parts))
    # A batch smaller than a group is one group.
    if size < min(split.group, num_samples):
        message = (
            f"micro_batch_size={size} must be at least the group size {split.group}: a group is normalised in one "
            "micro-batch. Use a larger micro_batch_size or a smaller group."
        )
        raise BatchSizeError(message, micro_batch_size=size, code="group_too_large")
    groups, per_unit = group_sizes(num_samples, split.group), max(1, size // split.group)
    return tuple(sum(groups[start : start + per_unit]) for start in range(0, len(groups), per_unit))


def _check_groups(share_sizes: Sequence[int], split: SplitOptions) -> None:
    """Raise a `BatchSizeError` if a share ends within a group."""
    if split.group is None:
        return
    total = sum(share_sizes)
    # Groups are counted from the first sample of the whole batch.
    borders = {0, *itertools.accumulate(group_sizes(total, split.group))}
    for rank, end in enumerate(itertools.accumulate(share_sizes)):
        if end not in borders:
            message = (
                f"the share of rank {rank} ends after sample {end} of {total}, within a group of {split.group}. "
                "Make each share a multiple of the group (the last may be shorter), or feed the engine from ab.batches."
            )
            raise BatchSizeError(message, code="group_cut")


def _ranges(sizes: Iterable[int], start: int) -> Iterable[tuple[int, int]]:
    return itertools.pairwise(itertools.accumulate(sizes, initial=start))


def plan_of(
    num_samples: int, shares: tuple[tuple[Unit, ...], ...], split: SplitOptions, order: tuple[int, ...] | None = None
) -> BatchPlan:
    """Return a plan with the given units per rank; in lockstep, pad short shares by repeating a unit with weight 0."""
    # An empty batch has no unit to repeat.
    if split.lockstep and num_samples:
        shares = _in_lockstep(shares)
    return BatchPlan(num_samples=num_samples, shares=shares, split=split, order=order)


def _in_lockstep(shares: tuple[tuple[Unit, ...], ...]) -> tuple[tuple[Unit, ...], ...]:
    # Fillers take the time of a forward and backward, but do not contribute to any sum.
    longest = max(shares, key=len)
    number = itertools.count(sum(len(share) for share in shares))
    return tuple(
        share
        + tuple(
            Unit(next(number), borrowed.start, borrowed.stop, weight=0.0)
            for borrowed in itertools.repeat((share or longest)[-1], len(longest) - len(share))
        )
        for share in shares
    )


def _describe_ragged(sizes: Sequence[tuple[int, ...]]) -> str:
    """Return the unit sizes per rank, with equal ranks grouped: `rank 0: 5 x 16 + 4; ranks 1-2: ...`."""
    parts = []
    for share, group in itertools.groupby(enumerate(sizes), key=lambda item: item[1]):
        ranks = [rank for rank, _ in group]
        name = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        runs = [(size, len(list(run))) for size, run in itertools.groupby(share)]
        terms = " + ".join(f"{count} x {size}" if count > 1 else f"{size}" for size, count in runs) or "nothing"
        parts.append(terms if len(sizes) == 1 else f"{name}: {terms}")
    return "; ".join(parts)
