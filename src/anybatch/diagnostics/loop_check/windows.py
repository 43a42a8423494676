"""From traces to windows: which micro-batches each optimizer step was made of, and what happened to their gradients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anybatch.diagnostics.loop_check.loop_trace import Backward, LoopTrace, TableGradient

TOLERANCE = 1e-5
"""Weights this close are equal: rounding in float32 stays below, and the smallest fault on the stage is 0.1."""


@dataclass(frozen=True, slots=True)
class Part:
    """One micro-batch: its rank, the number of its forward there, its epoch, its samples."""

    rank: int
    number: int
    epoch: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The micro-batches of one optimizer step, over all ranks, and the state of its gradient.

    Attributes:
        number: the step's, from 0.
        parts: micro-batches whose backward came since the step before.
        gradient: what the optimizer met on rank 0.
        is_stale: the first backward found the gradient of the step before.
        lost: lines at which a gradient was found cleared that should not have been: inside the window.
        lost_tail: micro-batches of the epoch before that were cleared without a step.
        is_cleared: the step met no gradient, though there was one after its last backward.
        agree: whether all ranks met the same gradient.
        num_reductions: reductions by DistributedDataParallel since the step before; None without it.
        num_backwards: backwards on rank 0 since the step before.
        line: line of the step.
    """

    number: int
    parts: tuple[Part, ...]
    gradient: TableGradient
    is_stale: bool
    lost: tuple[int | None, ...]
    lost_tail: tuple[Part, ...]
    is_cleared: bool
    agree: bool
    num_reductions: int | None
    num_backwards: int
    line: int | None

    @property
    def is_clean(self) -> bool:
        """Whether the gradient is made of these micro-batches and of nothing else."""
        return not (self.is_stale or self.lost or self.is_cleared) and self.agree

    @property
    def ids(self) -> Counter[int]:
        """How often each sample is in it."""
        return Counter(sample for part in self.parts for sample in part.ids)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the rank that has most; one that goes through the model twice counts once."""
        return max(Counter(rank for rank, _ in {(part.rank, part.ids) for part in self.parts}).values(), default=0)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs it has micro-batches of."""
        return tuple(sorted({part.epoch for part in self.parts}))


def parts_of(trace: LoopTrace, rank: int, num_epochs: int, num_batches: int) -> list[Part]:
    """Return the forwards of a rank with their epochs.

    Args:
        trace: of the rank.
        rank: which.
        num_epochs: how many there were; 0 where the loop may have ended anywhere.
        num_batches: micro-batches of an epoch, where neither calls nor an even division tell.
    """
    total = len(trace.forwards)
    # Epochs are not visible to hooks, so they are counted in forwards.
    divides = num_epochs and total and total % num_epochs == 0 and trace.ended
    per_epoch = total // num_epochs if divides else num_batches
    ends = (
        trace.calls
        if num_epochs and len(trace.calls) == num_epochs
        else [per_epoch * (1 + epoch) for epoch in range(total)]
    )
    epochs = [next(epoch for epoch, end in enumerate(ends) if number < end) for number in range(total)]
    return [
        Part(rank, number, epoch, forward.ids)
        for number, (epoch, forward) in enumerate(zip(epochs, trace.forwards, strict=True))
    ]


def steps_of(traces: Sequence[LoopTrace], parts: Sequence[Sequence[Part]]) -> list[StepParts]:
    """Return the optimizer steps that all ranks made."""
    found = []
    for number in range(min(len(trace.steps) for trace in traces)):
        shares = [_share(trace, all_parts, number) for trace, all_parts in zip(traces, parts, strict=True)]
        gradients = [trace.steps[number].gradient for trace in traces]
        step, before = traces[0].steps[number], traces[0].steps[number - 1] if number else None
        reductions = step.num_reductions - (before.num_reductions if before else 0)
        found.append(
            StepParts(
                number=number,
                parts=tuple(part for share in shares for part in share.parts),
                gradient=gradients[0],
                is_stale=any(share.is_stale for share in shares),
                lost=shares[0].lost,
                lost_tail=tuple(part for share in shares for part in share.lost_tail),
                is_cleared=any(share.is_cleared for share in shares),
                agree=all(is_close(gradient, gradients[0]) for gradient in gradients),
                num_reductions=None if traces[0].reductions is None else reductions,
                num_backwards=step.num_backwards - (before.num_backwards if before else 0),
                line=step.line,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's share of a step; the fields are those of `StepParts`."""

    parts: tuple[Part, ...]
    is_stale: bool
    lost: tuple[int | None, ...]
    lost_tail: tuple[Part, ...]
    is_cleared: bool


def _share(trace: LoopTrace, parts: Sequence[Part], number: int) -> _Share:
    step = trace.steps[number]
    backwards = trace.backwards[trace.steps[number - 1].num_backwards if number else 0 : step.num_backwards]
    if not backwards:
        return _Share((), is_stale=False, lost=(), lost_tail=(), is_cleared=False)
    if any(backward.before is None for backward in backwards):
        # Gradients that the loop adds up by itself: what it does with them shows in the weights only.
        all_parts = tuple(part for backward in backwards for part in _parts(backward, parts))
        return _Share(all_parts, is_stale=False, lost=(), lost_tail=(), is_cleared=False)
    kept, lost, lost_tail = list(_parts(backwards[0], parts)), [], []
    for number_in, (earlier, later) in enumerate(pairwise(backwards), start=1):
        new = _parts(later, parts)
        # The gradient was there after one backward and gone before the next: the loop has cleared it in between.
        if _is_zero(later.before) and not _is_zero(earlier.after):
            coming = {part.ids for backward in backwards[number_in:] for part in _parts(backward, parts)}
            # Between two epochs this is a tail without a step; within an epoch the window has lost its beginning.
            if new and kept and new[0].epoch > kept[-1].epoch:
                lost_tail += kept
                kept = []
            elif kept and all(part.ids in coming for part in kept):
                kept = []  # the same samples again, at other parameters: a first pass that was never meant to be kept
            else:
                lost.append(later.line)
        kept += new
    is_cleared = _is_zero(step.gradient) and not _is_zero(backwards[-1].after)
    stale = not _is_zero(backwards[0].before)
    return _Share(tuple(dict.fromkeys(kept)), stale, tuple(lost), tuple(lost_tail), is_cleared)


def _parts(backward: Backward, parts: Sequence[Part]) -> list[Part]:
    return [parts[forward] for forward in backward.forwards]


def rescaled_lines(trace: LoopTrace) -> list[int | None]:
    """Return the lines of backwards that found the gradient of the one before them changed, though not cleared."""
    # Only backwards of one window are compared: a step in between may clear gradients or keep them.
    ends = {step.num_backwards for step in trace.steps}
    return [
        later.line
        for number, (earlier, later) in enumerate(pairwise(trace.backwards), start=1)
        if number not in ends
        and later.before is not None
        and not _is_zero(later.before)
        and not is_close(later.before, earlier.after)
    ]


def weights(gradient: TableGradient, units: TableGradient) -> Mapping[int, float]:
    """Return each sample's weight in a gradient: the multiple of its unit gradient that is nearest."""
    # The least-squares multiple; rows of samples do not mix, so each is its own one-dimensional problem.
    products, squares = (gradient * units).sum((1, 2)), units.square().sum((1, 2))
    # A sample without a gradient has weight 0 instead of NaN.
    found = torch.where(squares > 0, products / squares, 0.0)
    return {sample: weight for sample, weight in enumerate(found.tolist()) if abs(weight) > TOLERANCE / 100}


def is_combination(gradient: TableGradient, units: TableGradient) -> bool:
    """Return whether a gradient is nothing but multiples of the samples' unit gradients."""
    nearest = torch.zeros(len(units), 1, 1, dtype=units.dtype)
    for sample, weight in weights(gradient, units).items():
        nearest[sample] = weight
    return is_close(nearest * units, gradient)


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


def near(found: float, expected: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(found - expected) <= TOLERANCE * max(abs(found), abs(expected))


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not bool(gradient.any())
