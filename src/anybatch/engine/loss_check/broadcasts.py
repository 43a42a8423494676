"""Finds where a loss function lets every sample meet every other by broadcasting: (n, 1) against (n,)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class BroadcastWatch(TorchFunctionMode):
    """Notes the first function that broadcasts a column of samples against a row of as many.

    Predictions of shape (n, 1) and targets of shape (n,) give a matrix (n, n) of all pairs, and its mean is a number
    like any other.

    Args:
        num_samples: n, at least 2.

    Attributes:
        found: what was seen, in words; empty if nothing was.
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
        """Run the function, and look at the shapes that it is given."""
        given = dict(kwargs or {})
        # Labels are compared with each other on purpose.
        tensors = (one for one in _tensors((*args, *given.values())) if one.is_floating_point())
        shapes = [tuple(one.shape) for one in tensors]
        if not self.found and self._column in shapes and self._row in shapes:
            square = (*self._row, *self._row)
            name = getattr(func, "__name__", str(func)).strip("_")
            self.found = (
                f"In {name} a tensor of shape {self._column} meets one of shape {self._row}, which broadcasts to "
                f"{square}: every sample's output is compared with every sample's target"
            )
        return func(*args, **given)


def _tensors(values: Sequence[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
