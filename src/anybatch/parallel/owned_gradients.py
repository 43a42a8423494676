"""Accumulated gradients that no captured graph can overwrite."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch

from anybatch.parallel.torch_internals import num_storage_users

_NOTHING = nullcontext()


class OwnedGradients:
    """Copies each parameter's first gradient of an effective batch, after the backward that produced it.

    If `.grad` is None, autograd installs the new gradient without a copy. A captured graph
    (`torch.compile(mode="reduce-overhead")`, `torch.cuda.make_graphed_callables`) returns gradients in static buffers,
    so its next backward would overwrite the accumulated gradient. Later gradients are added in place, and are safe. On
    a CPU, where copying costs as much as a small backward, a gradient whose memory nothing else references is kept.

    Enter it around the forward and backward of every micro-batch but the last, after which no backward follows.
    `parameters` are the tensors whose gradients accumulate in `.grad`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        self._parameters = parameters
        self._pending = parameters
        self._around: AbstractContextManager[object] = _NOTHING

    def restart(self) -> None:
        """Start an effective batch, whose gradients are all None."""
        self._pending = self._parameters

    def around(self, context: AbstractContextManager[object]) -> "OwnedGradients":
        """Enter another context too, around a micro-batch."""
        self._around = context
        return self

    def __enter__(self) -> object:
        return self._around.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._around.__exit__(kind, error, traceback)
        # After the first micro-batch only parameters that no sample has used yet are pending.
        if kind is None and self._pending:
            self._pending = [parameter for parameter in self._pending if not _copy_gradient(parameter)]


def _copy_gradient(parameter: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    # Plans run on fake tensors, which nothing overwrites. Copies seldom raise a step's peak: gradients are copied one
    # at a time, after the backward has freed the activations.
    if not hasattr(parameter.grad, "fake_mode") and _may_be_static(parameter.grad):
        parameter.grad = parameter.grad.clone()
    return True


def _may_be_static(gradient: torch.Tensor) -> bool:
    """Return whether something else may write to a gradient's memory.

    Captured CUDA graphs write to addresses, so no reference count shows them. On a CPU, memory that torch did not
    allocate, such as numpy's, is not resizable.
    """
    if gradient.layout is not torch.strided or gradient.device.type != "cpu" or hasattr(gradient, "device_mesh"):
        return True
    storage = gradient.untyped_storage()
    return not storage.resizable() or num_storage_users(storage) != 1
