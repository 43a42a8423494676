"""Detects loss functions that compare every sample with every other by broadcasting: (n, 1) against (n,)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class BroadcastWatch(TorchFunctionMode):
    """Records the first function that broadcasts a column (n, 1) of samples against a row (n,).

    Predictions of shape (n, 1) and targets of shape (n,) give a matrix (n, n) of all pairs, and its mean looks like a
    normal loss.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._column, self._row = (num_samples, 1), (num_samples,)
        self.found = ""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 (torch's protocol)
        types: Any,  # noqa: ANN401 (the same)
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (the same)
        """Run the function, and check the shapes of its arguments."""
        given = dict(kwargs or {})
        # Only floating-point tensors: losses that compare integer labels with each other do so on purpose.
        tensors = (tensor for tensor in _tensors((*args, *given.values())) if tensor.is_floating_point())
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if not self.found and self._column in shapes and self._row in shapes:
            square = (*self._row, *self._row)
            name = getattr(func, "__name__", str(func)).strip("_")
            self.found = (
                f"In {name}, tensors of shapes {self._column} and {self._row} broadcast to {square}: every sample's "
                "output is compared with every sample's target"
            )
        return func(*args, **given)


def _tensors(values: Sequence[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
