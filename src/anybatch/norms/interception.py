"""Takes the place of `F.batch_norm` while a model runs, whoever calls it; the model itself stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `F.batch_norm` that normalises by the statistics of what it is given.

    Attributes:
        values: (samples, channels, ...).
        running_mean: which layer it is, by its buffer; None where nothing is tracked.
        weight: per channel, or None.
        bias: per channel, or None.
        eps: added to the variance.
    """

    values: Tensor
    running_mean: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Interception(TorchFunctionMode):
    """A context in which batches are normalised by a function of ours. It holds for the thread that enters it.

    What runs under torch.compile does not come by here.
    """

    def __init__(self, normalise: Callable[[Call], Tensor]) -> None:
        super().__init__()
        self._normalise = normalise

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 (whatever torch's function returns)
        """Run a function of torch, or ours in the place of `F.batch_norm`."""
        del types
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(  # noqa: PLR0917 (torch's signature)
        self,
        input: Tensor,  # noqa: A002 (torch's name for it)
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        with torch.autocast(input.device.type, enabled=False):
            return self._normalise(Call(input, running_mean, weight, bias, eps))
