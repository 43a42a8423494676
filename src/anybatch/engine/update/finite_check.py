"""A loss or gradient that is not finite is acted on before the next update, without making the loop wait."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.errors import NonFiniteError

_MAX_NAMES = 4
_Seen = tuple[Float[Tensor, ""], Float[Tensor, ""] | None]


class FiniteCheck:
    """Looks at loss and gradient norm of each step: on the CPU at once, before the update; else one step later.

    On an accelerator reading the number would make the loop wait for the device, so it is copied to the host in the
    background and read before the *next* update, when it has long arrived: the update in between has been made.

    Args:
        device: of the numbers.
        state: function () -> names of weights and buffers that were not finite before the step.
    """

    def __init__(self, device: torch.device, state: Callable[[], Sequence[str]] = tuple) -> None:
        self._device, self._is_cpu = device, device.type == "cpu"
        self._state = state
        self._pending: tuple[int, torch.Tensor, torch.Event, _Seen] | None = None

    def check(self, contributions: Float[Tensor, " terms"], norm: Float[Tensor, ""] | None, step: int) -> None:
        """Raise if a step, or on an accelerator the one before it, is not finite.

        Args:
            contributions: of each term to its loss.
            norm: its gradient norm, where that is measured.
            step: its number.

        Raises:
            NonFiniteError: with the step, and both numbers.
        """
        if self._is_cpu:  # reading waits for nothing, and asks faster than torch does
            numbers = sum(contributions.tolist()) + (0.0 if norm is None else norm.item())
            if not math.isfinite(numbers):
                raise self._error(step, (contributions.sum(), norm), late=False)
            return
        self.settle()
        loss = contributions.sum()
        copy = (loss if norm is None else loss + norm).detach().to("cpu", non_blocking=True)
        event = torch.Event(self._device)
        # Once the device has come to this event, the copy has arrived.
        event.record()
        self._pending = (step, copy, event, (loss.detach(), norm))

    def settle(self) -> None:
        """Look at what has been copied but not been looked at: before the next update, a checkpoint, the end."""
        if self._pending is None:
            return
        step, copy, event, seen = self._pending
        # Dropped before it is looked at, so that one number raises once.
        self._pending = None
        event.synchronize()
        if not torch.isfinite(copy):
            raise self._error(step, seen, late=True)

    def _error(self, step: int, seen: _Seen, *, late: bool) -> NonFiniteError:
        loss, norm = (None if number is None else number.item() for number in seen)
        measured = "" if norm is None else f" and the gradient norm is {norm:.4g}"
        happened = (
            "Found while the next step was computing: the update of that step has been made, so go back to a checkpoint"
            if late
            else "The update was not made: parameters and optimizer are as before"
        )
        names = () if late else self._state()
        cause = (
            f"Not finite already before the step: {', '.join(map(repr, names[:_MAX_NAMES]))}"
            f"{f' and {len(names) - _MAX_NAMES} more' if len(names) > _MAX_NAMES else ''}."
            if names
            else "Look for a learning rate that is too high, samples that are not finite themselves, or a loss that "
            "divides by zero; clip=1.0 helps against spikes."
        )
        message = f"step {step} (counted from 0) is not finite: the loss is {loss:.4g}{measured}. {happened}. {cause}"
        return NonFiniteError(message, step=step, updated=late)
