"""Sees what the user's program changes between steps and during one, where gradients add up."""

import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from anybatch.core.loss_kinds import LossFunction
from anybatch.core.torch_internals import BatchNormBase, num_changes
from anybatch.core.tree import Batch
from anybatch.engine.inputs import Model
from anybatch.engine.telemetry.notifier import Notifier
from anybatch.engine.torch_internals import (
    DropoutBase,
    TrainableParts,
    accumulation_hooks,
    num_accumulation_hooks,
    tensor_hooks,
    without_tensor_hooks,
)
from anybatch.errors import LossError, ParameterError
from anybatch.parallel.local_parts import local_part
from anybatch.parallel.strategy import ParameterLayout, Prepared
from anybatch.parallel.world import World

DIFFERS_IN_TRAINING = (DropoutBase, BatchNormBase)
"""Layers whose forward depends on the mode."""
_GRADIENT = operator.attrgetter("grad")
_WATCHED = "Seeing that a loss function changes gradients"
_NOTHING = nullcontext()
_NUM_STEPS = 2
"""First steps in which every call of the loss function is looked at."""
_NAMED = 4
"""Most parameters that an error names."""


class StepGuard:
    """Sees that from the first micro-batch to the update nobody but the engine changes gradients.

    Gradients add up in `.grad`, which belongs to the user between steps, as do parameters and modes. So a step begins
    by looking at what is there, and the loss function, which runs while gradients add up, is watched.

    Args:
        model: the user's own, or named ones.
        modules: everything that trains.
        prepared: what the strategy has made of it.
        notifier: gives warnings.
        world: the ranks.
        replaces_parameters: the strategy puts other parameters into the modules, and they change during a step.

    Raises:
        ParameterError: a parameter has a hook that runs after each accumulation.
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
        room = sum(buffer.numel() for buffer in self._buffers)
        self._all_in_buffers = room == sum(local_part(one).numel() for one in self._parameters)
        self._call = prepared.call
        self._notifier = notifier
        self._world, self._roll_call = world, world.roll_call
        # Hooks see whole gradients, as on the user's own parameters.
        self._layout = prepared.layout if replaces_parameters else ParameterLayout()
        self._trained = TrainableParts(modules)
        self._hooks: list[tuple[int, Callable[[torch.Tensor], torch.Tensor | None]]] = []
        self._looks_left = 0
        self._steps_left = _NUM_STEPS
        self._num_accumulation_hooks = 0
        self._refuse_hooks()

    def begin_step(self) -> AbstractContextManager[None]:
        """Return the context in which the micro-batches of one effective batch are run, again too.

        The user's hooks on parameters are off meanwhile, see `run_hooks`.

        Raises:
            ParameterError: other parameters are trainable than when the engine was made, or one has a hook that runs
                after each accumulation.
        """
        self._refuse_other_parameters()
        self._refuse_hooks()
        self._warn_of_gradients()
        self._warn_of_evaluation_mode()
        # What a loss function does with gradients it does from the start; later on one look per step has to do.
        self._looks_left = sys.maxsize if self._steps_left else 1
        self._hooks = tensor_hooks(self._parameters)
        if self._roll_call is not None:
            self._roll_call.has_hooks = bool(self._hooks)
        return without_tensor_hooks(self._parameters) if self._hooks else _NOTHING

    def end_step(self) -> None:
        """Note that the effective batch has been run."""
        self._steps_left -= bool(self._steps_left)

    def call(self, function: LossFunction, batch: Batch) -> Any:  # noqa: ANN401 (whatever the loss returns)
        """Call a function with the model, as `Prepared.call` does, and look at gradients before and after.

        It is looked at in all micro-batches of the first steps, and in the first one of each later step.

        Raises:
            LossError: the function has changed gradients, with `backward()` or `zero_grad()`.
        """
        if not self._looks_left:
            return self._call(function, batch)
        self._looks_left -= 1
        before = self._gradients()
        num_before = self._num_changes(before)
        output = self._call(function, batch)
        after = self._gradients()
        if not all(map(operator.is_, before, after)) or self._num_changes(after) != num_before:
            message = (
                "the loss function changed gradients (backward() or zero_grad()) while those of the effective batch "
                "add up. Return the loss, and leave backward() to the engine, which also clears gradients; for a "
                "gradient inside of the loss use torch.autograd.grad."
            )
            raise LossError(message)
        return output

    def run_hooks(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the user's hooks on parameters (`Tensor.register_hook`), once, on the summed gradients, in place.

        Args:
            gradients: of each trainable parameter, summed and divided; None for one that no rank used.

        Raises:
            RankFailedError: a hook has raised on another rank; no rank makes the update.
        """
        if self._roll_call is None or not self._roll_call.any_hooks:
            if self._hooks:
                self._run_hooks(gradients, gradients)
            return
        self._roll_call.has_agreed = False  # a rank whose hook raises keeps the others from the update
        numbers = self._world.gather_from_processes([number for number, _ in self._hooks])
        # Before the hooks, so that one that raises leaves no rank in a collective.
        whole = {
            number: self._layout.gather(gradient)
            for number in sorted(set().union(*numbers))
            if (gradient := gradients[number]) is not None
        }
        self._world.run_on_all_processes(lambda: self._run_hooks(gradients, whole))
        self._roll_call.has_agreed = True

    @torch.no_grad()
    def _run_hooks(
        self,
        gradients: Sequence[torch.Tensor | None],
        whole: "Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]",
    ) -> None:
        """Run this rank's hooks on whole gradients, and put the results where gradients are."""
        for number, hook in self._hooks:
            gradient = gradients[number]
            seen = None if gradient is None else whole[number]
            if gradient is None or seen is None:
                continue
            changed = hook(seen)
            if changed is not None:
                seen.copy_(changed)
            if seen is not gradient:
                gradient.copy_(self._layout.scatter(seen, gradient))

    def _gradients(self) -> list[torch.Tensor | None]:
        return list(map(_GRADIENT, self._parameters))

    def _num_changes(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        # A view and its buffer have one count: where all are views, a few buffers stand for hundreds of parameters.
        return num_changes(self._buffers if self._all_in_buffers else (*gradients, *self._buffers), _WATCHED)

    def _refuse_other_parameters(self) -> None:
        if self._modules is None or self._trained.are_there:
            return
        found = TrainableParts(self._modules)
        if found.ids == self._trained.ids:  # other modules, and no other parameter that trains
            self._trained = found
            return
        now = {id(p): name for name, p in self._modules.named_parameters() if p.requires_grad}
        own = dict(zip(map(id, self._parameters), self._names, strict=True))
        added = [name for key, name in now.items() if key not in own]
        gone = [name for key, name in own.items() if key not in now]
        said = [
            f"{word}: {_some(names)}"
            for word, names in (("trainable now, and not trained by it", added), ("frozen, or not in it now", gone))
            if names
        ]
        if not said:  # a tied parameter has come or gone at one of its places
            self._trained = found
            return
        message = (
            f"the model has other trainable parameters than when the engine was made. {'; '.join(said)}. "
            "An engine trains the parameters that it was made with: close it and make a new one, whose optimizer holds "
            "exactly those that are to be trained."
        )
        raise ParameterError(message)

    def _refuse_hooks(self) -> None:
        # Strategies have one on every parameter, so that all are looked at only where their number has changed.
        num_hooks = num_accumulation_hooks(self._parameters)
        if num_hooks == self._num_accumulation_hooks:
            return
        refuse_accumulation_hooks(dict(zip(self._names, self._parameters, strict=True)))
        self._num_accumulation_hooks = num_hooks

    def _warn_of_evaluation_mode(self) -> None:
        # A root alone: parts of a model may be in evaluation mode on purpose, such as a frozen trunk.
        if all(root.training for root in self._roots):
            return
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
                f"the model is in evaluation mode, so {', '.join(affected)} do not train as they would. Call "
                "model.train() before the step (engine.evaluate puts modes back by itself); where it is meant, put the "
                "layers themselves into evaluation mode and not the model."
            )
            self._notifier.warn("model_in_evaluation_mode", message)

    def _warn_of_gradients(self) -> None:
        gradients = self._gradients()
        if any(map(operator.is_not, gradients, itertools.repeat(None))):
            found = [name for name, gradient in zip(self._names, gradients, strict=True) if gradient is not None]
            message = (
                f"before this step {len(found)} of {len(self._names)} parameters had a gradient that is not of the "
                f"effective batch: {_some(found)}. It came from a backward() outside of the engine, and is not added: "
                "the engine clears gradients when a step begins. If it was meant to count, make it a part of the loss "
                "function; if not, nothing is wrong."
            )
            self._notifier.warn("gradients_from_elsewhere", message)


def refuse_accumulation_hooks(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse hooks of the user's that run after each accumulation.

    Args:
        parameters: by name.

    Raises:
        ParameterError: with the parameter and a remedy.
    """
    names = list(parameters)
    for number, hook in accumulation_hooks(list(parameters.values())):
        if not getattr(hook, "__module__", "").startswith("anybatch."):
            message = (
                f"parameter {names[number]!r} has a post-accumulate hook ({hook!r}), which would run in every "
                "micro-batch, on a part of the gradient. Remove it (its handle's remove()): the engine updates once "
                "per effective batch. To look at the summed gradient or change it, use parameter.register_hook, which "
                "the engine runs once per step, or optimizer.register_step_pre_hook."
            )
            raise ParameterError(message)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
