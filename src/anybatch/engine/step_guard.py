"""Detect that the user's program changes gradients, parameters or modes, between or during steps."""

import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from anybatch.core.loss_kinds import LossFunction
from anybatch.core.torch_internals import (
    BatchNormBase,
    DropoutBase,
    TrainableParts,
    accumulation_hooks,
    num_accumulation_hooks,
    num_changes,
    tensor_hooks,
    without_tensor_hooks,
)
from anybatch.core.tree import Batch
from anybatch.engine.notifier import Notifier
from anybatch.engine.user_code import Model
from anybatch.errors import LossError, ParameterError
from anybatch.parallel.dtensors import local_part
from anybatch.parallel.strategy import Prepared
from anybatch.parallel.world import World

DIFFERS_IN_TRAINING = (DropoutBase, BatchNormBase)
"""Layers whose forward differs between train mode and eval mode."""
_GRADIENT, _TRAINING = operator.attrgetter("grad"), operator.attrgetter("training")
_WATCHED = "Detecting that a loss function changes gradients"
_NOTHING = nullcontext()
_NUM_STEPS = 2
"""Number of steps, from the first on, in which every call of the loss function is checked."""
_MAX_NAMES = 4
"""Maximum number of parameter names in a message."""


class StepGuard:
    """Detects changes of gradients by other code, from the first micro-batch to the update.

    Gradients add up in `.grad`. Between steps the user may change gradients, parameters and modes, so each step begins
    with a check of all three. The loss function runs while gradients add up, so its calls are checked too.
    """

    def __init__(
        self,
        model: Model,
        modules: nn.Module,
        prepared: Prepared,
        notifier: Notifier,
        world: World,
        *,
        replaces_parameters: bool,
    ) -> None:
        self._roots = (model,) if isinstance(model, nn.Module) else tuple(model.values())
        self._modules = None if replaces_parameters else modules
        self._names = list(prepared.parameters)
        self._parameters = list(prepared.parameters.values())
        self._buffers = prepared.gradient_buffers
        num_in_buffers = sum(buffer.numel() for buffer in self._buffers)
        self._all_in_buffers = num_in_buffers == sum(local_part(weight).numel() for weight in self._parameters)
        self._call = prepared.call
        self._notifier = notifier
        self._world, self._call_tracker = world, world.call_tracker
        self._trained = TrainableParts(modules)
        self._hooks: list[tuple[int, Callable[[torch.Tensor], torch.Tensor | None]]] = []
        self.may_have_hooks = False
        self._checks_left = 0
        self.steps_left = _NUM_STEPS
        self._num_accumulation_hooks = 0
        if num_hooks := num_accumulation_hooks(self._parameters):
            self._raise_new_hooks(num_hooks)

    def begin_step(self) -> AbstractContextManager[None]:
        """Check the state before a step, and return a context in which its micro-batches run.

        The context can be entered repeatedly. It disables the user's hooks on parameters; `run_hooks` runs them later.
        """
        if self._modules is not None and not self._trained.are_unchanged:
            self._raise_other_parameters(self._modules)
        # Strategies register hooks on parameters too, so only a changed number of hooks is a reason to check them.
        if (num_hooks := num_accumulation_hooks(self._parameters)) != self._num_accumulation_hooks:
            self._raise_new_hooks(num_hooks)
        if any(map(operator.is_not, map(_GRADIENT, self._parameters), itertools.repeat(None))):
            self._warn_of_gradients()
        # Only the models themselves: parts of a model, such as a frozen trunk, may be in evaluation mode on purpose.
        if not all(map(_TRAINING, self._roots)):
            self._warn_of_evaluation_mode()
        # A loss function that changes gradients does this in the first steps; later, one check per step is enough.
        self._checks_left = sys.maxsize if self.steps_left else 1
        self._hooks = tensor_hooks(self._parameters)
        if self._hooks and self._modules is None:
            check_hooks_on_shards(dict(zip(self._names, self._parameters, strict=True)))
        self.may_have_hooks = bool(self._hooks) or self._call_tracker is not None
        if self._call_tracker is not None:
            self._call_tracker.has_hooks = bool(self._hooks)
        return without_tensor_hooks(self._parameters) if self._hooks else _NOTHING

    def end_step(self) -> None:
        """Count one of the first `_NUM_STEPS` steps."""
        self.steps_left -= 1

    def call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (any output of the loss)
        """Call the loss function with the model and a batch, and check that it does not change gradients.

        Checks all micro-batches of the first steps, and the first micro-batch of each later step.
        """
        if not self._checks_left:
            return self._call(function, batch)
        self._checks_left -= 1
        before = list(map(_GRADIENT, self._parameters))
        # A view has the version counter of its buffer: if all gradients are views, checking the buffers is enough.
        counted = self._buffers if self._all_in_buffers else (*before, *self._buffers)
        num_before = num_changes(counted, _WATCHED)
        output = self._call(function, batch)
        # Version counters are comparable only for the same tensors.
        is_same = all(map(operator.is_, before, map(_GRADIENT, self._parameters)))
        if not is_same or num_changes(counted, _WATCHED) != num_before:
            message = (
                "the loss function changed gradients (backward() or zero_grad()) during a step. Return the loss: the "
                "engine calls backward() and clears gradients. For a gradient inside the loss, use "
                "torch.autograd.grad."
            )
            raise LossError(message, code="gradients_changed")
        return output

    def run_hooks(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the user's hooks on parameters (`Tensor.register_hook`) once, on the summed gradients, in place."""
        if self._call_tracker is None:
            self._run_hooks(gradients)
        elif self._call_tracker.any_hooks:
            self._call_tracker.has_agreed = False  # if a hook raises on one rank, no rank may update
            self._world.run_on_all_ranks(lambda: self._run_hooks(gradients))
            self._call_tracker.has_agreed = True

    @torch.no_grad()
    def _run_hooks(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run this rank's hooks, and write their results to the gradients."""
        for number, hook in self._hooks:
            gradient = gradients[number]
            if gradient is not None and (changed := hook(gradient)) is not None:
                gradient.copy_(changed)

    def _raise_other_parameters(self, modules: nn.Module) -> None:
        current = TrainableParts(modules)
        if current.ids == self._trained.ids:  # modules changed, trainable parameters did not
            self._trained = current
            return
        now = {id(p): name for name, p in modules.named_parameters() if p.requires_grad}
        before = dict(zip(map(id, self._parameters), self._names, strict=True))
        added = [name for key, name in now.items() if key not in before]
        removed = [name for key, name in before.items() if key not in now]
        changes = [
            f"{change}: {_some(names)}"
            for change, names in (("trainable now, but not in the engine", added), ("now frozen or removed", removed))
            if names
        ]
        if not changes:  # a parameter that several modules share was added to or removed from one of them
            self._trained = current
            return
        message = (
            f"the trainable parameters have changed since the engine was created. {'; '.join(changes)}. "
            "Close this engine and create a new one, with an optimizer over the parameters to train."
        )
        raise ParameterError(message, code="other_parameters")

    def _raise_new_hooks(self, num_hooks: int) -> None:
        check_accumulation_hooks(dict(zip(self._names, self._parameters, strict=True)))
        self._num_accumulation_hooks = num_hooks

    def _warn_of_evaluation_mode(self) -> None:
        affected = sorted(
            {
                type(module).__name__
                for root in self._roots
                if not root.training
                for module in root.modules()
                if isinstance(module, DIFFERS_IN_TRAINING)
            }
        )
        if affected:
            message = (
                f"the model is in evaluation mode, so {', '.join(affected)} layers do not run as in training. Call "
                "model.train() before the step (engine.evaluate restores modes automatically). If this is intended, "
                "put the layers instead of the model into evaluation mode."
            )
            self._notifier.warn("model_in_evaluation_mode", message)

    def _warn_of_gradients(self) -> None:
        pairs = zip(self._names, map(_GRADIENT, self._parameters), strict=True)
        names = [name for name, gradient in pairs if gradient is not None]
        message = (
            f"{len(names)} of {len(self._names)} parameters already had gradients from a backward() outside the "
            f"engine, which were discarded: {_some(names)}. If they should count, add their loss in the loss function."
        )
        self._notifier.warn("gradients_from_elsewhere", message)


def check_hooks_on_shards(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse hooks of `register_hook` under a strategy that shards parameters."""
    names = list(parameters)
    for number, _ in tensor_hooks(list(parameters.values())):
        message = (
            f"parameter {names[number]!r} has a hook (register_hook), which would see a shard of its gradient under "
            "this strategy. Use optimizer.register_step_pre_hook, or strategy='all_reduce'."
        )
        raise ParameterError(message, code="hook_on_shard")


def check_accumulation_hooks(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse user hooks that run after each accumulation."""
    names = list(parameters)
    for number, hook in accumulation_hooks(list(parameters.values())):
        if not getattr(hook, "__module__", "").startswith("anybatch."):
            message = (
                f"parameter {names[number]!r} has a post-accumulate hook ({hook!r}), which would run in every "
                "micro-batch, on a part of the gradient. Remove it with its handle. To read or change the summed "
                "gradient, use parameter.register_hook, which the engine runs once per step, or "
                "optimizer.register_step_pre_hook."
            )
            raise ParameterError(message, code="accumulation_hook")


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_MAX_NAMES])) + (
        f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    )
