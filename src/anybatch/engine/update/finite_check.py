"""A loss or gradient that is not finite is acted on before the next update, without making the loop wait."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.errors import NonFiniteError


class FiniteCheck:
    """Looks at one number per step. On the CPU at once, before the update; on an accelerator one step later.

    On an accelerator reading the number would make the loop wait for the device, so it is copied to the host in the
    background and read before the *next* update, when it has long arrived: the update in between has been made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[int, torch.Tensor, torch.Event] | None = None

    def check(self, number: Float[Tensor, ""], step: int) -> None:
        """Raise if `number`, zero-axis, or the one of the step before, is not finite.

        Raises:
            NonFiniteError: with the step.
        """
        if self._device.type == "cpu":
            if not math.isfinite(number.item()):  # on a CPU reading waits for nothing, and asks faster than torch does
                raise _error(step, late=False)
            return
        self.settle()
        copy = number.detach().to("cpu", non_blocking=True)
        event = torch.Event(self._device)
        # Once the device has come to this event, the copy has arrived.
        event.record()
        self._pending = (step, copy, event)

    def settle(self) -> None:
        """Look at what has been copied but not been looked at: before the next update, a checkpoint, the end."""
        if self._pending is None:
            return
        step, copy, event = self._pending
        # Dropped before it is looked at, so that one number raises once.
        self._pending = None
        event.synchronize()
        if not torch.isfinite(copy):
            raise _error(step, late=True)


def _error(step: int, *, late: bool) -> NonFiniteError:
    happened = (
        "Found while the next step was computing: the update of that step has been made, so go back to a checkpoint"
        if late
        else "The update was not made: parameters and optimizer are as before"
    )
    message = (
        f"the loss or gradient of step {step} (counted from 0) is not finite. {happened}. Look for a learning rate "
        "that is too high, samples that are not finite themselves, or a loss that divides by zero; clip=1.0 helps "
        "against spikes."
    )
    return NonFiniteError(message, step=step, updated=late)
