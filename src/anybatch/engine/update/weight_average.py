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

    The horizon is in optimizer steps, 1 / (1 - decay) of them: it means the same at any micro-batch size and number of
    ranks, and should be shortened when the effective batch grows.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", 1992, in the exponential form
    that Kingma and Ba, 2014, section 7.2 name.

    Args:
        parameters: by name; averaged in float32 where they are bf16 or fp16.
        decay: between 0 and 1, such as 0.999.
        wide_weights: function () -> this rank's parts of the weights at full precision, in the order of `parameters`.
            An average of rounded bf16 weights would miss nearly all of their movement.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], decay: float, wide_weights: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        if not 0.0 < decay < 1.0:
            message = f"average_decay={decay} must lie between 0 and 1, such as 0.999 for a horizon of 1,000 steps."
            raise UserError(message)
        self.decay = decay
        self._parameters = dict(parameters)
        self._wide_weights = wide_weights
        # In float32: a bf16 average would stand still, like a bf16 sum.
        self.weights = {name: widened(parameter.detach()).clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of one more step in."""
        # Of parts, which torch can take together with plain tensors.
        averages = list(map(local_part, self.weights.values()))
        interpolate_each(averages, self._wide_weights(), 1.0 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run with the averaged weights in the model; its own are back afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            self._put(self.weights)
            yield
        finally:
            self._put(own)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Go on from saved averages."""
        for name, weight in self.weights.items():
            weight.copy_(weights[name])

    @torch.no_grad()
    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])
