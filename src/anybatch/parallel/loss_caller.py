"""Runs a loss function inside the forward of a wrapper, such as DDP's, with the user's own model."""

from collections.abc import Callable
from typing import Any

from torch import nn


class LossCaller(nn.Module):
    """A module around everything that trains, whose forward runs any function of the user's model.

    All calls in the function, `model(x)` or `model.encode(x)`, take part in the wrapper's forward and backward. Passing
    the wrapper instead would let `wrapper.module.encode` train with unreduced gradients.

    Args:
        modules: everything that trains.
        model: the user's object, the argument of functions.
    """

    def __init__(self, modules: nn.Module, model: object) -> None:
        super().__init__()
        self.modules_to_train = modules
        self._model = (model,)  # in a tuple, so that a module is not registered twice

    def forward(self, function: Callable[[object], Any]) -> Any:  # noqa: ANN401 (the loss's result)
        """Return the function's result. The function already holds its batch, so wrappers do not move the tensors."""
        return function(self._model[0])
