"""Warn about parameters that only skipped micro-batches use: their gradient is None instead of zero."""

from collections.abc import Sequence

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.core.tree import Batch, copied, moved_to, tensors_of
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.inputs import Model
from anybatch.engine.notifier import Notifier
from anybatch.engine.side_effects import trial_run

_NUM_LOOKS = 2
_MAX_NAMES = 4


class MaskedParameters:
    """Checks parameters without a gradient after a step that has skipped micro-batches.

    A micro-batch with a count of zero (all of its targets are masked) is not run. An optimizer skips a parameter whose
    gradient is None, whereas weight decay and momentum change a parameter whose gradient is zero. One forward of a
    skipped micro-batch shows whether it uses the parameter. Two steps are checked.

    Args:
        context: of the loop.
        model: argument of the loss functions.
        modules: all trained modules.
        notifier: sends the warning.
    """

    def __init__(self, context: LoopContext, model: Model, modules: nn.Module, notifier: Notifier) -> None:
        self._context = context
        self._model = model
        self._modules = modules
        self._notifier = notifier
        self.looks_left = _NUM_LOOKS

    def look(self, left_out: Batch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Warn if a skipped micro-batch uses a parameter that has no gradient in this step.

        Args:
            left_out: a micro-batch that was not run.
            gradients: of each parameter, over all ranks.
        """
        names = [
            name
            for name, gradient in zip(self._context.prepared.parameters, gradients, strict=True)
            if gradient is None
        ]
        if not names:
            return
        self.looks_left -= 1
        parameters = [self._context.prepared.parameters[name] for name in names]
        buffers, device = BufferValues(self._modules), parameters[0].device
        try:
            with (
                trial_run(),
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                self._context.autocast(),
            ):
                output = self._context.loss.function(self._model, moved_to(copied(left_out), device))
                roots = [one.sum() for one in tensors_of(output) if one.requires_grad]
                found = torch.autograd.grad(roots, parameters, allow_unused=True) if roots else ()
        except Exception:  # noqa: BLE001 (such as a loss that fails if all targets are masked)
            return
        finally:
            buffers.restore()
        reached = [name for name, gradient in zip(names, found, strict=False) if gradient is not None]
        if reached:
            more = f" and {len(reached) - _MAX_NAMES} more" if len(reached) > _MAX_NAMES else ""
            message = (
                f"only micro-batches with all targets masked use {', '.join(reached[:_MAX_NAMES])}{more}. Such "
                "micro-batches are not run, so the optimizer skips these parameters; in the un-split batch their "
                "gradient is zero, and weight decay and momentum change them. Use larger micro-batches, or remove "
                "samples without targets from the data."
            )
            self._notifier.warn("parameters_reached_where_masked", message, everywhere=True)
