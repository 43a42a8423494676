"""The weights of samples in a gradient, relative to the gradient that the same loop has on one un-split batch.

The loss is the user's and unknown. So the loop itself runs on one batch, with accumulation steps of one: this gives its
un-split gradient, and with it the gradient of each sample with weight one. Where it cannot be run like that, the scale
comes from the common loss whose gradient has the same direction; without one, the scale is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from anybatch.diagnostics.loop_check.judged_loop import JudgedLoop
from anybatch.diagnostics.loop_check.probe import NUM_ROWS, TargetKind
from anybatch.diagnostics.loop_check.recorder import TOLERANCE, LoopTrace, TableGradient, is_close

OutputLoss = Callable[[Tensor, Tensor], Tensor]


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _shifted_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(outputs[:, :-1], targets[:, 1:])


COMMON_LOSSES: Mapping[TargetKind, tuple[OutputLoss, ...]] = MappingProxyType(
    {
        "classes": (_cross_entropy,),
        "tokens": (_cross_entropy, _shifted_cross_entropy),
        "values": (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits),
    }
)
"""Means over their targets; for "values", of outputs without a position axis."""


class UnitGradients:
    """Gradients of single samples with weight one, measured with the loop."""

    def __init__(self, loop: JudgedLoop, trace: LoopTrace) -> None:
        self.scale_is_known = True
        self._loop, self._data = loop, loop.data
        self._takes_batch = loop.takes_loader or "micro_batch_size" in loop.parameters.needed
        self._trace = trace if loop.takes_loader else loop.run(range(NUM_ROWS), steps=1, epochs=1)
        self._measured: dict[tuple[int, ...], TableGradient | None] = {}
        self.of(loop.ids)  # decides whether the scale is known

    def of(self, ids: Sequence[int]) -> TableGradient | None:
        """Return one row per sample, whose mean over these samples is their un-split gradient; None if unknown.

        The row of a sample without a gradient (a masked target, say) is zero.
        """
        key = tuple(sorted(set(ids)))
        if key not in self._measured:
            self._measured[key] = self._measure(key)
        return self._measured[key]

    def _measure(self, ids: tuple[int, ...]) -> TableGradient | None:
        loop, gradient, has_scale = self._loop, None, self._loop.knows_steps
        if self._takes_batch:
            trace = loop.run(ids, size=len(ids), steps=1, epochs=1)
            if loop.takes_loader or [len(forward.ids) for forward in trace.forwards[:1]] == [len(ids)]:
                gradient = self._of_outputs(trace, ids)
                used = trace.steps[0].gradient if trace.steps else None
                # Otherwise the optimizer used the gradients of some samples only.
                if gradient is not None and used is not None and set(visible(ids, gradient)) <= set(visible(ids, used)):
                    gradient = used
        if gradient is None:  # it makes micro-batches itself: measured on its own, as if the loss were a mean
            gradient = self._of_outputs(self._trace, ids)
            has_scale = loop.knows_steps and not loop.takes_loader
        if gradient is None or not gradient.isfinite().all():
            return None
        if not has_scale:
            scaled = self._scaled(gradient, ids)
            # Unknown for one window is unknown for all, since windows are then compared with each other.
            self.scale_is_known = self.scale_is_known and scaled is not None
            gradient = gradient if scaled is None else scaled
        return gradient * len(ids)

    def _of_outputs(self, trace: LoopTrace, ids: Sequence[int]) -> TableGradient | None:
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
        """Return the gradient of the common loss that has this direction."""
        for loss in COMMON_LOSSES[self._data.kind]:
            outputs = self._data.outputs[list(ids)].clone().requires_grad_()
            given = outputs.squeeze(1) if self._data.kind == "values" else outputs
            (rows,) = torch.autograd.grad(loss(given, self._data.targets[list(ids)]), outputs)
            common = torch.zeros_like(gradient)
            common[list(ids)] = rows.to(common.dtype)
            ratio = float((gradient * common).sum() / common.square().sum())
            if ratio > 0 and is_close(ratio * common, gradient):
                return common
        return None


def weights(gradient: TableGradient, units: TableGradient) -> Mapping[int, float]:
    """Return the weight of each sample in a gradient: the nearest multiple of its unit gradient.

    Samples without weight, or without a unit gradient, are left out.
    """
    # Rows do not mix, so each is a least-squares problem in one dimension.
    products, squares = (gradient * units).sum((1, 2)), units.square().sum((1, 2))
    multiples = torch.where(squares > 0, products / squares, 0.0)
    return {sample: weight for sample, weight in enumerate(multiples.tolist()) if abs(weight) > TOLERANCE / 100}


def visible(ids: Sequence[int], units: TableGradient) -> list[int]:
    """Return the samples that have a gradient, so that their weight can be seen."""
    return [sample for sample in ids if units[sample].any()]


def is_combination(gradient: TableGradient, units: TableGradient) -> bool:
    """Return whether a gradient is a weighted sum of the samples' unit gradients."""
    nearest = torch.zeros(len(units), 1, 1, dtype=units.dtype)
    for sample, weight in weights(gradient, units).items():
        nearest[sample] = weight
    return is_close(nearest * units, gradient)
