"""Learning-rate schedulers and the average of the weights, which both advance after every update."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.core.geometry import require
from anybatch.core.tensors import widened
from anybatch.core.torch_internals import chained_schedulers, change_each
from anybatch.errors import UserError
from anybatch.parallel.dtensors import local_part


class Scheduler(Protocol):
    """Any object with the method `step` of a torch learning-rate scheduler; it is called once per optimizer step."""

    def step(self) -> None:
        """Set the next step's learning rates."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Any object whose state can be saved: a scheduler, a loader, an average."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values and tensors."""
        ...

    def load_state_dict(self, state: Any) -> Any:  # noqa: ANN401 (as torch has it)
        """Restore the state."""
        ...


SchedulerFunction = Callable[[Optimizer], Scheduler]


def scheduler_of(scheduler: "Scheduler | SchedulerFunction | None", optimizer: Optimizer) -> Scheduler | None:
    """Return the scheduler, or the result of calling the function with the optimizer; refuse unsuitable schedulers."""
    if scheduler is None:
        return None
    is_valid = callable(scheduler) or hasattr(scheduler, "step")
    require(is_valid, "scheduler", scheduler, "a torch scheduler, a function optimizer -> scheduler, or None")
    # A class of schedulers also has `step`, but is called with the optimizer like a function.
    made = scheduler if hasattr(scheduler, "step") and not isinstance(scheduler, type) else scheduler(optimizer)
    if not hasattr(made, "step"):
        message = (
            f"{scheduler=} returned {type(made).__name__}, which has no method step. Pass a torch scheduler, or a "
            "function such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)."
        )
        raise UserError(message)
    name, other = type(made).__name__, getattr(made, "optimizer", optimizer)
    if other is not optimizer:
        message = (
            f"scheduler {name} belongs to another optimizer ({type(other).__name__} at {id(other):#x}) than the "
            f"engine's ({type(optimizer).__name__} at {id(optimizer):#x}), so it would have no effect. Create it with "
            f"the engine's optimizer, or pass a function: scheduler=lambda optimizer: {name}(optimizer, ...)."
        )
        raise UserError(message)
    required = _required_arguments(made)
    if required:
        message = (
            f"{name}.step needs the arguments {', '.join(required)}, but the engine calls step() without arguments. "
            "Step it yourself, for example after engine.evaluate, and save it with the run: "
            "engine.save_also(scheduler=scheduler)."
        )
        raise UserError(message, code="step_arguments")
    return made


def unsaved_scheduler(optimizer: Optimizer, saved: Iterable[object]) -> str:
    """Return a warning if a scheduler that is not in `saved` sets the learning rates; otherwise an empty string."""
    # Every torch scheduler adds this key to the groups of its optimizer.
    is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if not is_scheduled or any(getattr(item, "optimizer", None) is optimizer for item in saved):
        return ""
    return (
        "the learning rate is set by a scheduler that the engine does not know. It is not saved, so a resumed run "
        "would restart the schedule. Pass it as Engine(scheduler=...), which steps it once per update, or step it "
        "yourself and call engine.save_also(scheduler=scheduler)."
    )


class StepCounter:
    """Detects that both the engine and the user's loop step a scheduler, so that rates change twice as fast.

    torch's schedulers count their steps in `last_epoch`; other schedulers are not checked.
    """

    def __init__(self) -> None:
        self._expected: int | None = None

    def step(self, scheduler: Scheduler) -> str:
        """Step the scheduler, and return a warning if it was stepped since the last call, or an empty string."""
        before, expected = num_scheduled(scheduler), self._expected
        self._expected = None  # until the step has succeeded
        scheduler.step()
        self._expected = num_scheduled(scheduler)
        if before is None or expected is None or before != expected + 1:
            return ""
        return (
            f"{type(scheduler).__name__} was stepped between two steps of the engine, so its rates change twice as "
            f"fast. Its step count was {expected} after the first step and {before} before the second. Remove "
            "scheduler.step() from your loop, since the engine calls it once per update; or omit "
            "Engine(scheduler=...), step it yourself, and call engine.save_also(scheduler=scheduler)."
        )

    def forget(self) -> None:
        """Reset the expected count, after the scheduler was replaced or its state was loaded."""
        self._expected = None


def num_scheduled(scheduler: object) -> int | None:
    """Return the step count of a scheduler; None if it has none."""
    chained = chained_schedulers(scheduler)
    last = getattr(chained[0] if chained else scheduler, "last_epoch", None)
    return last if isinstance(last, int) else None


@contextmanager
def scale_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates by a factor within the context, and restore the exact rates afterwards.

    A rate in a tensor is changed in place, since captured CUDA graphs read this tensor.
    """
    before = [
        rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in optimizer.param_groups
    ]
    try:
        _set_rates(optimizer, [rate * factor for rate in before])
        yield
    finally:
        _set_rates(optimizer, before)


def _set_rates(optimizer: Optimizer, rates: Iterable[float | torch.Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(rate, torch.Tensor):
            group["lr"].copy_(rate)
        else:
            group["lr"] = rate


def _required_arguments(scheduler: Scheduler) -> list[str]:
    parameters = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [item.name for item in parameters if item.default is item.empty and item.kind in positional]


class WeightAverage:
    """Keeps `average = decay * average + (1 - decay) * weights`, updated after every optimizer step.

    The horizon is 1 / (1 - decay) optimizer steps. It does not depend on the micro-batch size or the number of ranks;
    shorten it if the effective batch grows.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, in the exponential form
    of Kingma and Ba, 2014, section 7.2.

    Args:
        parameters: the trained parameters, by name; bf16 and fp16 parameters are averaged in float32.
        decay: a number between 0 and 1, such as 0.999.
        wide_weights: function () -> this rank's parts of the weights at full precision, in the order of `parameters`.
            An average of weights that are rounded to bf16 would miss most of their changes.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, wide_weights: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        if not 0.0 < decay < 1.0:
            message = f"average_decay={decay} must be between 0 and 1, such as 0.999 for a horizon of 1,000 steps."
            raise UserError(message)
        self.decay = decay
        self._parameters = dict(parameters)
        self._wide_weights = wide_weights
        # In float32: a bf16 average would lose small updates, like a bf16 sum.
        self.weights = {name: widened(parameter.detach()).clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        # Only this rank's parts, since torch cannot combine DTensors with plain tensors.
        averages = list(map(local_part, self.weights.values()))
        change_each("lerp", averages, self._wide_weights(), 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averaged weights in the model within the context."""
        trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._put(self.weights)
            yield
        finally:
            self._put(trained)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restore saved averages."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @torch.no_grad()
    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
