"""An exponential moving average of the weights, once per optimizer step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from anybatch.core.dtypes import widened
from anybatch.core.torch_internals import interpolate_each
from anybatch.errors import UserError
from anybatch.parallel.local_parts import local_part


class WeightAverage:
    """Keeps `average = decay * average + (1 - decay) * weights`, updated after every optimizer step.

    The horizon is 1 / (1 - decay) optimizer steps. It does not depend on the micro-batch size or the number of ranks;
    shorten it if the effective batch grows.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, in the exponential form
    of Kingma and Ba, 2014, section 7.2.

    Args:
        parameters: by name; averaged in float32 where they are bf16 or fp16.
        decay: between 0 and 1, such as 0.999.
        wide_weights: function () -> this rank's parts of the weights at full precision, in the order of `parameters`:
            an average of rounded bf16 weights would miss most of their changes.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, wide_weights: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        if not 0.0 < decay < 1.0:
            message = f"average_decay={decay} must be between 0 and 1, such as 0.999 for a horizon of 1,000 steps."
            raise UserError(message)
        self.decay = decay
        self._parameters = dict(parameters)
        self._wide_weights = wide_weights
        # In float32: a bf16 average would lose small updates, like a bf16 sum.
        self.weights = {name: widened(parameter.detach()).clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the current weights."""
        # Local parts, since torch cannot combine DTensors with plain tensors.
        averages = list(map(local_part, self.weights.values()))
        interpolate_each(averages, self._wide_weights(), 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averaged weights in the model temporarily."""
        trained = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._put(self.weights)
            yield
        finally:
            self._put(trained)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Restore saved averages."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @torch.no_grad()
    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
