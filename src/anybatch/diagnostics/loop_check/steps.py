"""From traces to optimizer steps: the micro-batches of each step over all ranks, and faults in its gradient."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from anybatch.diagnostics.loop_check.recorder import LoopTrace, RankStep, TableGradient, is_close


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch: its rank, the number of its forward there, its epoch, its samples."""

    rank: int
    number: int
    epoch: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The micro-batches of one optimizer step over all ranks, and the gradient that the optimizer used.

    Attributes:
        number: of the step, from 0.
        micro_batches: those whose backward came since the step before.
        gradient: used by the optimizer on rank 0.
        is_stale: the first backward found the gradient of the step before.
        is_lost: the gradient was cleared between micro-batches.
        lost_tail: micro-batches of the epoch before whose gradients were cleared without a step.
        is_cleared: the optimizer found no gradient, although the last backward left one.
        is_equal_on_ranks: all ranks used the same gradient.
        num_reductions: reductions by DistributedDataParallel since the step before.
        num_backwards: backwards on rank 0 since the step before.
        line: line of the step.
    """

    number: int
    micro_batches: tuple[MicroBatch, ...]
    gradient: TableGradient
    is_stale: bool
    is_lost: bool
    lost_tail: tuple[MicroBatch, ...]
    is_cleared: bool
    is_equal_on_ranks: bool
    num_reductions: int
    num_backwards: int
    line: int | None

    @property
    def is_clean(self) -> bool:
        """Whether the gradient is made of these micro-batches only."""
        return not (self.is_stale or self.is_lost or self.is_cleared) and self.is_equal_on_ranks

    @property
    def ids(self) -> Counter[int]:
        """How often each sample is in it."""
        return Counter(sample for each in self.micro_batches for sample in each.ids)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the rank with most; a micro-batch that passes through the model twice counts once."""
        by_rank = Counter(rank for rank, _ in {(each.rank, each.ids) for each in self.micro_batches})
        return max(by_rank.values(), default=0)

    @property
    def epochs(self) -> frozenset[int]:
        """The epochs of its micro-batches."""
        return frozenset(each.epoch for each in self.micro_batches)


def micro_batches_of(trace: LoopTrace, rank: int, num_epochs: int, batches_per_epoch: int) -> list[MicroBatch]:
    """Return the micro-batches of a rank with their epochs.

    Args:
        trace: of the rank.
        rank: which.
        num_epochs: number of epochs; 0 if the loop may end anywhere.
        batches_per_epoch: used if neither calls nor an even division give the ends of epochs.
    """
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
    for number, rank_steps in enumerate(zip(*(trace.steps for trace in traces), strict=False)):
        shares = [_share(step, forwards) for step, forwards in zip(rank_steps, micro_batches, strict=True)]
        first, gradients = rank_steps[0], [step.gradient for step in rank_steps if step.gradient is not None]
        steps.append(
            Step(
                number=number,
                micro_batches=tuple(each for kept, _, _ in shares for each in kept),
                gradient=gradients[0],
                is_stale=any(step.is_stale for step in rank_steps),
                is_lost=shares[0][1],
                lost_tail=tuple(each for _, _, tail in shares for each in tail),
                is_cleared=any(step.is_cleared for step in rank_steps),
                is_equal_on_ranks=all(is_close(gradient, gradients[0]) for gradient in gradients),
                num_reductions=first.num_reductions,
                num_backwards=first.num_backwards,
                line=first.line,
            )
        )
    return steps


def _share(step: RankStep, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], bool, list[MicroBatch]]:
    """Return a rank's micro-batches of a step, whether it lost some of them, and a lost tail of the epoch before."""
    groups = [[micro_batches[number] for number in numbers] for numbers in (*step.cleared, step.forwards)]
    is_lost, tail, kept = False, [], []
    for number, (group, later) in enumerate(pairwise(groups), start=1):
        coming = {each.ids for rest in groups[number:] for each in rest}
        if group and later and later[0].epoch > group[-1].epoch:
            tail += [*kept, *group]
            kept = []
        elif not group or any(each.ids not in coming for each in group):
            is_lost = True
            kept += group
        # Otherwise the same samples come again, with other parameters: the first pass of SAM, which is not kept.
    return list(dict.fromkeys((*kept, *groups[-1]))), is_lost, tail
