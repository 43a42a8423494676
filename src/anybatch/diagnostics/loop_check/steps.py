"""The optimizer steps of a loop over all ranks, and the weights of samples in their gradients.

Weights are relative to the gradient of the same loop on one unsplit batch. The user's loss is unknown, so the loop runs
on one batch with one accumulation step. This run gives the unsplit gradient, and the gradient of each sample with
weight one (its unit gradient). If the loop cannot run on an unsplit batch, a common loss whose gradient has the same
direction determines the scale; without such a loss, the scale is unknown.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.diagnostics.loop_check.judged_loop import JudgedLoop
from anybatch.diagnostics.loop_check.probe import (
    NUM_ROWS,
    TOLERANCE,
    Forward,
    LoopTrace,
    RankStep,
    TableGradient,
    TargetKind,
    is_close,
    near,
)

OutputLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An optimizer step over all ranks, with all micro-batches whose backward ran since the previous step."""

    number: int  # from 1
    gradient: TableGradient  # used by the optimizer
    line: int | None  # of the optimizer step
    epochs: frozenset[int]  # of the micro-batches
    micro_batches: tuple[Forward, ...]
    unused: tuple[Forward, ...]  # forwards of other micro-batches since the previous step, without a backward
    lost: tuple[Forward, ...]  # micro-batches whose gradients were cleared before the step
    lost_tail: tuple[Forward, ...]  # cleared micro-batches of earlier epochs, which are not in `micro_batches`
    of_rank: RankStep  # the step on rank 0
    is_equal_on_ranks: bool

    @property
    def ids(self) -> Counter[int]:
        """The number of occurrences of each sample."""
        return Counter(sample for each in self.micro_batches for sample in each.ids)

    @property
    def size(self) -> int:
        """Maximum number of micro-batches of a rank; two forwards of the same micro-batch count once."""
        by_rank = Counter(rank for rank, _ in {(each.rank, each.ids) for each in self.micro_batches + self.unused})
        return max(by_rank.values(), default=0)

    @property
    def is_cleared(self) -> bool:
        """Whether the optimizer found no gradient, although there were backwards."""
        return self.of_rank.is_accumulated and not self.gradient.any()

    @property
    def is_clean(self) -> bool:
        """Whether the gradient is the sum of all these micro-batches' gradients, and nothing else."""
        return bool(self.ids) and self.is_equal_on_ranks and not (self.lost or self.is_cleared or self.of_rank.is_stale)


def set_epochs(trace: LoopTrace, rank: int, num_epochs: int, batches_per_epoch: int) -> None:
    """Set the rank and epoch of each micro-batch; `num_epochs` is 0 if the loop may end anywhere."""
    total, ends = len(trace.forwards), trace.call_ends
    if not num_epochs or len(ends) != num_epochs:
        # Hooks cannot observe the end of an epoch, so derive it from the number of forwards.
        is_even = num_epochs and total and total % num_epochs == 0 and trace.ended
        per_epoch = total // num_epochs if is_even else batches_per_epoch
        ends = [per_epoch * (1 + epoch) for epoch in range(total)]
    for number, forward in enumerate(trace.forwards):
        forward.rank, forward.epoch = rank, bisect_right(ends, number)


def steps_of(traces: Sequence[LoopTrace]) -> list[Step]:
    """Return the optimizer steps that all ranks made."""
    steps: list[Step] = []
    stepped = set[tuple[int, int, tuple[int, ...]]]()  # micro-batches of earlier steps
    for number, rank_steps in enumerate(zip(*(trace.steps for trace in traces), strict=False), start=1):
        used: list[Forward] = []
        lost: list[Forward] = []
        unused: list[Forward] = []
        for trace, step in zip(traces, rank_steps, strict=True):
            forwards = [trace.forwards[each] for each in sorted(step.forwards)]
            start = trace.steps[number - 2].num_forwards if number > 1 else 0
            if step.is_accumulated and step.gradient.any():  # `is_cleared` detects a gradient of zero
                gone = [each for each in forwards if each.has_gradient and not step.gradient[list(each.ids)].any()]
                # The step of another model may leave a gradient in this one, to be cleared.
                forwards = [each for each in forwards if each not in gone or each.key not in stepped]
                lost += [each for each in gone if each.key not in stepped]
            used += forwards
            others = trace.forwards[start : step.num_forwards]
            unused += [each for each in others if not each.has_backward and each.key not in {f.key for f in forwards}]
        stepped |= {each.key for each in used if each not in lost}
        last_epoch = max((each.epoch for each in used), default=0)
        micro_batches = tuple(each for each in used if each not in lost or each.epoch == last_epoch)
        steps.append(
            Step(
                number=number,
                gradient=rank_steps[0].gradient,
                line=rank_steps[0].line,
                epochs=frozenset(each.epoch for each in micro_batches),
                micro_batches=micro_batches,
                unused=tuple(unused),
                lost=tuple(each for each in lost if each.epoch == last_epoch),
                lost_tail=tuple(each for each in lost if each.epoch < last_epoch),
                of_rank=rank_steps[0],
                is_equal_on_ranks=all(is_close(step.gradient, rank_steps[0].gradient) for step in rank_steps),
            )
        )
    return steps


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


_COMMON_LOSSES: Mapping[TargetKind, tuple[OutputLoss, ...]] = {
    "classes": (_cross_entropy,),
    "tokens": (_cross_entropy, lambda outputs, targets: _cross_entropy(outputs[:, :-1], targets[:, 1:])),
    "values": (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits),
    "scores": (F.binary_cross_entropy, F.mse_loss, F.l1_loss),
}
"""Losses that are means over targets; for "values", the outputs have no position axis."""


class UnitGradients:
    """Gradients of single samples with weight one, measured with the loop."""

    def __init__(self, loop: JudgedLoop, trace: LoopTrace) -> None:
        self.scale_is_known = True
        self._loop, self._data = loop, loop.data
        self._takes_batch = loop.takes_loader or "micro_batch_size" in loop.needed
        self._trace = trace if loop.takes_loader else loop.run(range(NUM_ROWS), steps=1, epochs=1)
        self._measured: dict[tuple[int, ...], TableGradient | None] = {}
        self.of(loop.ids)  # sets `scale_is_known`

    def of(self, ids: Iterable[int]) -> TableGradient | None:
        """Return the unit gradients of these samples, one row per sample; None if unknown.

        The mean of the rows is the samples' unsplit gradient. A row is zero if its target is masked.
        """
        key = tuple(sorted(set(ids)))
        if key not in self._measured:
            self._measured[key] = self._measure(key)
        return self._measured[key]

    def _measure(self, ids: tuple[int, ...]) -> TableGradient | None:
        loop, gradient, has_scale = self._loop, None, self._loop.has_accumulation_steps
        if self._takes_batch:
            trace = loop.run(ids, size=len(ids), steps=1, epochs=1)
            if loop.takes_loader or [len(forward.ids) for forward in trace.forwards[:1]] == [len(ids)]:
                gradient = self._output_gradient(trace, ids)
                used = trace.steps[0].gradient if trace.steps else None
                # Use the optimizer's gradient, unless it lacks some of the samples.
                if gradient is not None and used is not None and set(visible(ids, gradient)) <= set(visible(ids, used)):
                    gradient = used
        if gradient is None:  # the loop makes micro-batches itself: weight them by size, as for a mean
            gradient = self._output_gradient(self._trace, ids)
            has_scale = loop.has_accumulation_steps and not loop.takes_loader
        if gradient is None or not gradient.isfinite().all():
            return None
        if not has_scale:
            scaled = self._scaled(gradient, ids)
            # If the scale of one step is unknown, steps are compared with each other, not with the unsplit batch.
            self.scale_is_known = self.scale_is_known and scaled is not None
            gradient = gradient if scaled is None else scaled
        return gradient * len(ids)

    def _output_gradient(self, trace: LoopTrace, ids: Sequence[int]) -> TableGradient | None:
        """Return the gradients of the samples' outputs, with micro-batches weighted by their size."""
        if not set(ids) <= trace.output_gradients.keys():
            return None
        # Reversed, so that the first forward of a sample counts, as in `output_gradients`.
        sizes = {sample: len(forward.ids) for forward in reversed(trace.forwards) for sample in forward.ids}
        rows = torch.zeros(self._data.outputs.shape, dtype=torch.float64)
        for sample in ids:
            rows[sample] = trace.output_gradients[sample] * sizes[sample] / len(ids)
        return rows

    def _scaled(self, gradient: TableGradient, ids: tuple[int, ...]) -> TableGradient | None:
        """Return the gradient of the common loss whose gradient has the same direction; None without one."""
        for loss in _COMMON_LOSSES[self._data.kind]:
            outputs = self._data.outputs[list(ids)].clone().requires_grad_()
            targets = self._data.targets[list(ids)]
            inputs = outputs if targets.dtype == torch.int64 else outputs.reshape(targets.shape)
            (rows,) = torch.autograd.grad(loss(inputs, targets), outputs)
            common = torch.zeros_like(gradient)
            common[list(ids)] = rows.to(common.dtype)
            ratio = float((gradient * common).sum() / common.square().sum())
            if ratio > 0 and is_close(ratio * common, gradient):
                return common
        return None


def weights(gradient: TableGradient, unit_rows: TableGradient) -> Mapping[int, float]:
    """Return the weights of the samples that have one in a gradient, as multiples of their unit gradients."""
    multiples = _multiples(gradient, unit_rows).flatten().tolist()
    return {sample: weight for sample, weight in enumerate(multiples) if abs(weight) > TOLERANCE / 100}


def _multiples(gradient: TableGradient, unit_rows: TableGradient) -> TableGradient:
    # Rows do not mix, so each is a least-squares problem in one dimension.
    squares = unit_rows.square().sum((1, 2), keepdim=True)
    return torch.where(squares > 0, (gradient * unit_rows).sum((1, 2), keepdim=True) / squares, 0.0)


def visible(ids: Sequence[int], unit_rows: TableGradient) -> list[int]:
    """Return the samples that have a gradient, so that their weight can be measured."""
    return [sample for sample in ids if unit_rows[sample].any()]


def is_combination(gradient: TableGradient, unit_rows: TableGradient) -> bool:
    """Return whether a gradient is a weighted sum of the samples' unit gradients."""
    return is_close(_multiples(gradient, unit_rows) * unit_rows, gradient)


@dataclass(frozen=True, slots=True)
class Share:
    """The factor of a micro-batch's mean gradient in the gradient of a step, and its factor in the unsplit gradient."""

    micro_batch: Forward
    found: float
    expected: float


def shares_of(step: Step, unit_gradients: UnitGradients) -> list[Share] | None:
    """Return the shares of the micro-batches with a gradient; empty if unknown, None if the loss compares samples."""
    unsplit = unit_gradients.of(step.ids)
    shares = []
    for micro_batch in step.micro_batches:
        rows = unit_gradients.of(micro_batch.ids)
        if unsplit is None or rows is None:
            return []
        ids, size = list(micro_batch.ids), len(micro_batch.ids)
        if not (seen := visible(ids, rows)):
            continue
        expected = float((unsplit[ids] * rows[ids]).sum() / rows[ids].square().sum())
        if not is_close(expected * rows[ids], unsplit[ids]):
            return None
        # A sample that occurs twice has the sum of two weights, so prefer a sample that occurs once.
        sample = min(seen, key=lambda sample: step.ids[sample] > 1)
        factor = weights(step.gradient, rows).get(sample, 0.0) / step.ids[sample] * size
        shares.append(Share(micro_batch, factor, expected * size / step.ids.total()))
    return shares


def total_of(shares: Sequence[Share]) -> float:
    """Return the sum of the shares relative to the unsplit batch: 1 in a correct step."""
    return sum(share.found for share in shares) / sum(share.expected for share in shares)


def all_near(values: Sequence[float]) -> bool:
    """Return whether all numbers are equal up to rounding."""
    return near(max(values), min(values))
