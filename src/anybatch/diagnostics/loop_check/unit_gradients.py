"""Unit gradients: the gradient in which a sample has weight one, measured on the loop's own un-split batch.

The loss is the user's and unknown. So the loop itself is run on one batch, with accumulation steps of one: whatever it
computes there is its un-split gradient, and a split one has to equal it. Where that cannot be had, the scale is taken
from a list of usual losses whose gradient has the same direction; where that fails too, it stays unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.diagnostics.loop_check.loop_trace import LoopTrace, TableGradient
from anybatch.diagnostics.loop_check.probe_model import NUM_ROWS, ProbeData, TargetKind
from anybatch.diagnostics.loop_check.windows import is_close

OutputLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _next_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(outputs[:, :-1], targets[:, 1:])


def _values(loss: OutputLoss) -> OutputLoss:
    return lambda outputs, targets: loss(outputs.squeeze(1), targets)


USUAL_LOSSES: Mapping[TargetKind, tuple[OutputLoss, ...]] = MappingProxyType(
    {
        "classes": (_cross_entropy,),
        "tokens": (_cross_entropy, _next_cross_entropy),
        "values": (
            _values(F.mse_loss),
            _values(F.l1_loss),
            _values(F.smooth_l1_loss),
            _values(F.binary_cross_entropy_with_logits),
        ),
    }
)
"""Means over their targets."""


@dataclass(slots=True)
class UnitGradients:
    """Gradients of single samples with weight one.

    Attributes:
        data: the samples.
        unsplit: returns the gradient of some samples as one batch, and whether its size is to be trusted, and not only
            its direction; None if the loop does not tell.
    """

    data: ProbeData
    unsplit: Callable[[tuple[int, ...]], tuple[TableGradient, bool] | None]
    _found: dict[tuple[int, ...], TableGradient | None] = field(default_factory=dict)
    scale_is_known: bool = True

    def of(self, ids: Sequence[int]) -> TableGradient | None:
        """Return one row per sample, such that the un-split mean of these samples is the mean of their rows."""
        key = tuple(sorted(set(ids)))
        if key not in self._found:
            self._found[key] = self._measure(key)
        return self._found[key]

    def _measure(self, ids: tuple[int, ...]) -> TableGradient | None:
        measured = self.unsplit(ids)
        # A sample without any gradient leaves nothing to measure weights by.
        if measured is None or not bool(measured[0][list(ids)].flatten(1).any(1).all()):
            return None
        gradient, has_scale = measured
        if not has_scale:
            scaled = self._usual(gradient, ids)
            # Unknown for one window is unknown for all: they are compared with each other then.
            self.scale_is_known = self.scale_is_known and scaled is not None
            gradient = gradient if scaled is None else scaled
        return gradient * len(ids)

    def _usual(self, gradient: TableGradient, ids: tuple[int, ...]) -> TableGradient | None:
        """Return the gradient of the usual loss that has this direction."""
        for loss in USUAL_LOSSES[self.data.kind]:
            outputs = self.data.outputs[list(ids)].clone().requires_grad_()
            (rows,) = torch.autograd.grad(loss(outputs, self.data.targets[list(ids)]), outputs)
            usual = torch.zeros_like(gradient)
            usual[list(ids)] = rows.to(usual.dtype)  # class weights in float32 make all of it so
            # A loss with the right direction differs by a factor, which is the unknown scale.
            ratio = float((gradient * usual).sum() / usual.square().sum())
            if ratio > 0 and is_close(ratio * usual, gradient):
                return usual
        return None


def gradient_of(trace: LoopTrace, ids: Sequence[int], shape: torch.Size) -> TableGradient | None:
    """Return the gradient of a run on one batch: what its optimizer met, else what its outputs received."""
    if trace.steps:
        gradient = trace.steps[0].gradient
        if bool(gradient[list(ids)].flatten(1).any(1).all()):
            return gradient
    return received(trace, ids, shape, by_size=False)


def received(trace: LoopTrace, ids: Sequence[int], shape: torch.Size, *, by_size: bool) -> TableGradient | None:
    """Return the gradients of the samples' outputs, times the size of their micro-batch if asked for."""
    if not set(ids) <= trace.by_sample.keys():
        return None
    # Reversed, so that the first forward of a sample counts, as in `by_sample`.
    size_of = {sample: len(forward.ids) for forward in reversed(trace.forwards) for sample in forward.ids}
    rows = torch.zeros(shape, dtype=torch.float64)
    for sample in ids:
        rows[sample] = trace.by_sample[sample] * (size_of[sample] if by_size else 1)
    return rows


def rows_by_size(trace: LoopTrace, shape: torch.Size) -> TableGradient:
    """Return the gradient of every sample's output, times the size of its micro-batch; zeros where none came."""
    ids = [sample for sample in range(NUM_ROWS) if sample in trace.by_sample]
    rows = received(trace, ids, shape, by_size=True)
    assert rows is not None
    return rows
