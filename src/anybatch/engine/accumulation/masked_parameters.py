"""Warns of parameters that only micro-batches without a count reach: plain torch gives them zeros, and not None."""

from collections.abc import Sequence

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.core.tree import Batch, copied, moved_to, tensors_of
from anybatch.engine.accumulation.accumulate import LoopContext
from anybatch.engine.inputs import Model
from anybatch.engine.side_effects import trial_run
from anybatch.engine.telemetry.notifier import Notifier

_NUM_LOOKS = 2
_MAX_NAMES = 4


class MaskedParameters:
    """Looks at the parameters that a step has left without a gradient, if it has left micro-batches out.

    A micro-batch that counts nothing (all of its targets are masked) is not run. An optimizer skips a parameter whose
    gradient is None, whereas weight decay and momentum move one whose gradient is zero. One forward of such a
    micro-batch shows whether it reaches the parameter. Two steps are looked at.

    Args:
        context: of the loop.
        model: what loss functions are called with.
        modules: everything that trains.
        notifier: gives the warning.
    """

    def __init__(self, context: LoopContext, model: Model, modules: nn.Module, notifier: Notifier) -> None:
        self._context = context
        self._model = model
        self._modules = modules
        self._notifier = notifier
        self.looks_left = _NUM_LOOKS

    def look(self, left_out: Batch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Warn if a micro-batch reaches a parameter that has no gradient in this step.

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
        except Exception:  # noqa: BLE001 (such as a loss that cannot be computed of masked targets alone)
            return
        finally:
            buffers.restore()
        reached = [name for name, gradient in zip(names, found, strict=False) if gradient is not None]
        if reached:
            more = f" and {len(reached) - _MAX_NAMES} more" if len(reached) > _MAX_NAMES else ""
            message = (
                f"only micro-batches that count nothing (all targets masked) use {', '.join(reached[:_MAX_NAMES])}"
                f"{more}. Such micro-batches are not run, so these parameters have no gradient in this step, and the "
                "optimizer skips them; in the un-split batch the gradient is zero, and weight decay and momentum move "
                "them. Use larger micro-batches, or leave samples without targets out of the data."
            )
            self._notifier.warn("parameters_reached_where_masked", message, everywhere=True)
