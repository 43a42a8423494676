"""A report's numbers on the host: at once on a CPU, one step late on an accelerator, so that nothing waits."""

import torch

from anybatch.core.reports import StepReport

Arrived = tuple[int, float, float | None]
"""Step, loss and gradient norm."""


class LateNumbers:
    """Takes each step's numbers, and gives those that have arrived.

    Args:
        device: where the numbers of a report are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: tuple[int, torch.Tensor, bool, torch.Event] | None = None

    def exchange(self, report: StepReport) -> Arrived | None:
        """Take a step's numbers; return them on a CPU, and those of the step before on an accelerator.

        That step lies before one that the host has already handed over whole, so its numbers have long been computed.
        """
        loss, norm = report.contributions.sum(), report.gradient_norm
        if self._device.type == "cpu":
            return report.step, float(loss), None if norm is None else float(norm)
        arrived = self._taken()
        both = torch.stack((loss, loss if norm is None else norm.to(loss.dtype)))
        copy = both.detach().to("cpu", non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        self._pending = report.step, copy, norm is not None, event
        return arrived

    def drop(self) -> None:
        """Forget what is on its way: it is of a step that was undone."""
        self._pending = None

    def _taken(self) -> Arrived | None:
        if self._pending is None:
            return None
        step, copy, has_norm, event = self._pending
        self._pending = None
        event.synchronize()
        loss, norm = copy.tolist()
        return step, loss, norm if has_norm else None
