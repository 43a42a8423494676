"""Learning-rate schedulers: given as they are, or as a function of an optimizer that is yet to be made."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from anybatch.core.whole_numbers import refuse_unless
from anybatch.engine.checkpoint_state import Scheduler
from anybatch.engine.torch_internals import chained_schedulers
from anybatch.errors import UserError

SchedulerFunction = Callable[[Optimizer], Scheduler]


def scheduler_of(scheduler: "Scheduler | SchedulerFunction | None", optimizer: Optimizer) -> Scheduler | None:
    """Return the scheduler, made for the optimizer where a function was given.

    Raises:
        UserError: what was given, or what the function returned, has no method `step`, is of another optimizer, or
            needs a metric in each step.
    """
    if scheduler is None:
        return None
    is_valid = callable(scheduler) or hasattr(scheduler, "step")
    refuse_unless(is_valid, "scheduler", scheduler, "a torch scheduler, a function optimizer -> scheduler, or None")
    # A class has a method `step` too, and is a function of the optimizer.
    made = scheduler if hasattr(scheduler, "step") and not isinstance(scheduler, type) else scheduler(optimizer)
    if not hasattr(made, "step"):
        message = (
            f"{scheduler=} gave {type(made).__name__}, which has no method step; pass a torch scheduler, or a function "
            "such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)."
        )
        raise UserError(message)
    name, own = type(made).__name__, getattr(made, "optimizer", optimizer)
    if own is not optimizer:
        message = (
            f"scheduler {name} was made for another optimizer ({type(own).__name__} at {id(own):#x}) than the engine "
            f"updates with ({type(optimizer).__name__} at {id(optimizer):#x}), so it would change nothing. Make it of "
            f"that one, or pass a function: scheduler=lambda optimizer: {name}(optimizer, ...)."
        )
        raise UserError(message)
    needed = _needed_in_step(made)
    if needed:
        message = (
            f"scheduler {name} needs {', '.join(needed)} in each step, and the engine steps a scheduler by itself, "
            "once per update. Step it yourself, behind engine.evaluate, say, and have it saved with the run: "
            "engine.save_also(scheduler=scheduler)."
        )
        raise UserError(message)
    return made


def unsaved_scheduler(optimizer: Optimizer, saved: Iterable[object]) -> str:
    """Return what to say where a scheduler that no checkpoint holds sets the learning rates; nothing otherwise.

    Args:
        optimizer: whose learning rates.
        saved: what a checkpoint holds, schedulers and others.
    """
    # Every scheduler of torch writes this into the groups of its optimizer.
    is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
    if not is_scheduled or any(getattr(one, "optimizer", None) is optimizer for one in saved):
        return ""
    return (
        "a scheduler that the engine does not know sets the learning rates, so it is not in the checkpoint, and a "
        "resumed run would begin its schedule again. Pass it as Engine(scheduler=...), which steps it once per update, "
        "or step it yourself and call engine.save_also(scheduler=scheduler)."
    )


class StepCounter:
    """Notices a scheduler that is stepped by the engine and by the user's loop: its rates would change twice as fast.

    Schedulers of torch count their steps in `last_epoch`; others are not looked at.
    """

    def __init__(self) -> None:
        self._expected: int | None = None

    def step(self, scheduler: Scheduler) -> str:
        """Step the scheduler; return the warning about a step in between, or an empty string."""
        before, expected = num_scheduled(scheduler), self._expected
        self._expected = None  # until the step has succeeded
        scheduler.step()
        self._expected = num_scheduled(scheduler)
        if before is None or expected is None or before != expected + 1:
            return ""
        return (
            f"{type(scheduler).__name__} was stepped between two steps of the engine: it had counted {expected} steps "
            f"after the first and {before} before the second, so learning rates change twice as fast. The engine steps "
            "its scheduler once per update: remove scheduler.step() from your loop; or leave out "
            "Engine(scheduler=...), step it yourself, and call engine.save_also(scheduler=scheduler)."
        )

    def forget(self) -> None:
        """Expect nothing: the scheduler was replaced, or its state was loaded."""
        self._expected = None


def num_scheduled(scheduler: object) -> int | None:
    """Return how many steps a scheduler has counted; None if it does not count."""
    chained = chained_schedulers(scheduler)
    last = getattr(chained[0] if chained else scheduler, "last_epoch", None)
    return last if isinstance(last, int) else None


@contextmanager
def at_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates meanwhile, and put back exactly what a scheduler has set; whatever scheduler it is.

    A rate in a tensor is changed in place, since captured graphs read that very tensor.
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


def _needed_in_step(scheduler: Scheduler) -> list[str]:
    parameters = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind in positional]
