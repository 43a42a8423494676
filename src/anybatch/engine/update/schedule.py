"""Learning-rate schedulers: given as they are, or as a function of an optimizer that is yet to be made."""

from collections.abc import Callable

from torch.optim import Optimizer

from anybatch.engine.checkpoint_state import Scheduler
from anybatch.errors import UserError

SchedulerFunction = Callable[[Optimizer], Scheduler]


def scheduler_of(scheduler: "Scheduler | SchedulerFunction | None", optimizer: Optimizer) -> Scheduler | None:
    """Return the scheduler, made for the optimizer where a function was given.

    Raises:
        UserError: what was given, or what the function returned, has no method `step`.
    """
    if scheduler is None:
        return None
    made = scheduler if hasattr(scheduler, "step") else scheduler(optimizer)
    if not hasattr(made, "step"):
        message = (
            f"{scheduler=} gave {type(made).__name__}, which has no method step; pass a torch scheduler, or a function "
            "such as lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)."
        )
        raise UserError(message)
    return made
