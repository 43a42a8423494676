"""A copy in memory of what training changes, to go back to: each rank copies what it holds, and nothing travels."""

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from anybatch.engine.update.precision import Target
from anybatch.engine.update.weight_average import WeightAverage

SCHEDULED = frozenset(
    {"params", "lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "max_momentum", "base_momentum"}
)
"""What is a schedule's in a parameter group: it goes on, and does not go back."""


class KeptState:
    """Weights, buffers, the optimizer's state and averaged weights, as they were after a step.

    Step count, schedule and data are not in it: they go on.

    Args:
        step: number of the step.
        modules: everything that trains.
        target: the optimizer and what it updates.
        average: averaged weights, or None.
        keep_on: where copies lie.

    Attributes:
        num_restored: how often it was put back.
    """

    def __init__(
        self,
        step: int,
        modules: nn.Module,
        target: Target,
        average: WeightAverage | None,
        *,
        keep_on: Literal["device", "cpu"],
    ) -> None:
        self.step = step
        self.num_restored = 0
        self._optimizer = target.optimizer
        self._on = None if keep_on == "device" else torch.device("cpu")
        self._tensors = [(tensor, self._copied(tensor)) for tensor in _tensors(modules, target, average)]
        self._states = {parameter: self._copied(state) for parameter, state in self._optimizer.state.items()}
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name not in SCHEDULED}
            for group in self._optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. The copy stays as it is, and can be put back again."""
        self.num_restored += 1
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        _restore_state(self._optimizer, self._states)
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(kept))

    def _copied(self, value: Any) -> Any:  # noqa: ANN401 (whatever an optimizer keeps)
        if isinstance(value, torch.Tensor):
            return value.detach().clone() if self._on is None else value.detach().to(self._on, copy=True)
        if isinstance(value, dict):
            return {name: self._copied(one) for name, one in value.items()}
        return copy.deepcopy(value)


def _tensors(modules: nn.Module, target: Target, average: WeightAverage | None) -> Iterator[torch.Tensor]:
    """Yield what an update or a forward changes in place; frozen parameters are not changed by either."""
    seen = set()
    found = [
        *(parameter for parameter in modules.parameters() if parameter.requires_grad),
        *modules.buffers(),
        *target.beside.values(),
        *(average.weights.values() if average is not None else ()),
    ]
    for tensor in found:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _restore_state(optimizer: Optimizer, kept: dict[Any, Any]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in kept:  # its state was made since
            del optimizer.state[parameter]
    for parameter, values in kept.items():
        now = optimizer.state[parameter]
        for name in set(now) - set(values):
            del now[name]
        for name, value in values.items():
            old = now.get(name)
            if isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor) and old.shape == value.shape:
                old.copy_(value)  # in place: captured graphs and sharded updates hold these tensors
            else:
                now[name] = copy.deepcopy(value)
