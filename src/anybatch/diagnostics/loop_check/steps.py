"""The optimizer steps of a loop over all ranks, and the factor of each micro-batch in their gradients."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from anybatch.diagnostics.loop_check.recorder import LoopTrace, RankStep, TableGradient, is_close, near
from anybatch.diagnostics.loop_check.unit_gradients import UnitGradients, weights


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: its rank, the number of its forward there, its epoch, its samples."""

    rank: int
    number: int
    epoch: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An optimizer step over all ranks, with all micro-batches whose backward came since the step before."""

    number: int  # from 1
    micro_batches: tuple[MicroBatch, ...]
    lost: tuple[MicroBatch, ...]  # with cleared gradients
    lost_tail: tuple[MicroBatch, ...]  # of the epoch before, with cleared gradients; not in `micro_batches`
    gradient: TableGradient  # used by the optimizer on rank 0
    is_stale: bool  # the first backward found the gradient of an earlier step
    is_cleared: bool  # the optimizer found no gradient, although there were backwards
    is_equal_on_ranks: bool
    num_reductions: int
    line: int | None

    @property
    def ids(self) -> Counter[int]:
        """The number of occurrences of each sample."""
        return Counter(sample for each in self.micro_batches for sample in each.ids)

    @property
    def size(self) -> int:
        """Micro-batches of the rank with most; a micro-batch that passes through the model twice counts once."""
        by_rank = Counter(rank for rank, _ in {(each.rank, each.ids) for each in self.micro_batches})
        return max(by_rank.values(), default=0)

    @property
    def epochs(self) -> frozenset[int]:
        """The epochs of its micro-batches."""
        return frozenset(each.epoch for each in self.micro_batches)

    @property
    def is_clean(self) -> bool:
        """Whether the gradient is made of all these micro-batches, and nothing else."""
        return bool(self.ids) and self.is_equal_on_ranks and not (self.lost or self.is_cleared or self.is_stale)


def micro_batches_of(trace: LoopTrace, rank: int, num_epochs: int, batches_per_epoch: int) -> list[MicroBatch]:
    """Return the micro-batches of a rank with their epochs; `num_epochs` is 0 if the loop may end anywhere."""
    total = len(trace.forwards)
    ends = trace.call_ends
    if not num_epochs or len(ends) != num_epochs:
        # Hooks do not see epochs, so forwards are counted.
        is_even = num_epochs and total and total % num_epochs == 0 and trace.ended
        per_epoch = total // num_epochs if is_even else batches_per_epoch
        ends = [per_epoch * (1 + epoch) for epoch in range(total)]
    return [
        MicroBatch(rank, number, next(epoch for epoch, end in enumerate(ends) if number < end), forward.ids)
        for number, forward in enumerate(trace.forwards)
    ]


def steps_of(traces: Sequence[LoopTrace], micro_batches: Sequence[Sequence[MicroBatch]]) -> list[Step]:
    """Return the optimizer steps that all ranks made."""
    steps = []
    for number, rank_steps in enumerate(zip(*(trace.steps for trace in traces), strict=False), start=1):
        used: list[MicroBatch] = []
        lost: list[MicroBatch] = []
        for trace, step, of_rank in zip(traces, rank_steps, micro_batches, strict=True):
            used += [of_rank[forward] for forward in sorted(step.forwards)]
            lost += [of_rank[forward] for forward in _lost_forwards(trace, step)]
        last_epoch = max((each.epoch for each in used), default=0)
        gradient = rank_steps[0].gradient
        steps.append(
            Step(
                number=number,
                micro_batches=tuple(each for each in used if each not in lost or each.epoch == last_epoch),
                lost=tuple(each for each in lost if each.epoch == last_epoch),
                lost_tail=tuple(each for each in lost if each.epoch < last_epoch),
                gradient=gradient,
                is_stale=rank_steps[0].is_stale,
                is_cleared=rank_steps[0].is_accumulated and not gradient.any(),
                is_equal_on_ranks=all(is_close(step.gradient, gradient) for step in rank_steps),
                num_reductions=rank_steps[0].num_reductions,
                line=rank_steps[0].line,
            )
        )
    return steps


def _lost_forwards(trace: LoopTrace, step: RankStep) -> list[int]:
    """Return the forwards whose gradients were cleared before the step, if it has any gradient at all."""
    if not step.is_accumulated or not step.gradient.any():
        return []
    had_gradient = [number for number in sorted(step.forwards) if trace.forwards[number].has_gradient]
    return [number for number in had_gradient if not step.gradient[list(trace.forwards[number].ids)].any()]


@dataclass(frozen=True, slots=True)
class Share:
    """The factor of a micro-batch's own mean gradient in a step, and the factor it has in the un-split batch."""

    micro_batch: MicroBatch
    found: float
    expected: float


def shares_of(step: Step, units: UnitGradients) -> list[Share]:
    """Return the shares of the micro-batches that have a gradient, in a clean step; none if they are unknown."""
    unsplit = units.of(tuple(step.ids))
    shares = []
    for micro_batch in step.micro_batches:
        rows = units.of(micro_batch.ids)
        if unsplit is None or rows is None:
            return []
        factors, expected = weights(step.gradient, rows), weights(unsplit, rows)
        # A sample that occurs twice has the sum of two weights, so one that occurs once is preferred.
        visible = sorted(expected.keys() & micro_batch.ids, key=lambda sample: (step.ids[sample] > 1, sample))
        if visible:
            sample, size = visible[0], len(micro_batch.ids)
            factor = factors.get(sample, 0.0) / step.ids[sample] * size
            shares.append(Share(micro_batch, factor, expected[sample] * size / step.ids.total()))
    return shares


def total_of(shares: Sequence[Share]) -> float:
    """Return the sum of the shares relative to the un-split batch: 1 in a correct step."""
    return sum(share.found for share in shares) / sum(share.expected for share in shares)


def all_near(values: Sequence[float]) -> bool:
    """Return whether all numbers are equal up to rounding."""
    return near(max(values), min(values))
