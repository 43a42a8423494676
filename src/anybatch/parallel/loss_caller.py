"""Runs a loss function inside the forward of a wrapper, such as DDP's, and hands it the user's own model."""

from collections.abc import Callable
from typing import Any

from torch import nn


class LossCaller(nn.Module):
    """A module around everything that trains, whose forward runs any function of the user's model.

    Whatever the function calls, `model(x)` or `model.encode(x)`, takes part in what the wrapper does in its forward and
    backward. Handing out the wrapper instead would let `wrapper.module.encode` train with unreduced gradients.

    Args:
        modules: everything that trains.
        model: what functions are called with, the user's own object.
    """

    def __init__(self, modules: nn.Module, model: object) -> None:
        super().__init__()
        self.modules_to_train = modules
        self._model = (model,)  # in a tuple, so that a module is not registered twice

    def forward(self, function: Callable[[object], Any]) -> Any:  # noqa: ANN401 (whatever the loss returns)
        """Return what the function returns. Its batch is bound in it, where no wrapper looks for tensors to move."""
        return function(self._model[0])
