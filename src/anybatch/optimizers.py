"""Combine several optimizers into one, such as Muon for the matrices of a model and AdamW for all other parameters."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from anybatch.errors import ParameterError


class CombinedOptimizer(Optimizer):
    """One optimizer that steps several optimizers over different parameters of a model.

    In plain PyTorch: `for optimizer in optimizers: optimizer.step()`. Its parameter groups are the groups of all
    optimizers, in order, so a scheduler multiplies each group's own learning rate by the same factor.

    ```python
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = CombinedOptimizer(torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=3e-4))
    ```

    Args:
        optimizers: at least one; no parameter is in two of them. They share the state of the combined optimizer, so do
            not use them separately afterwards.

    Raises:
        ParameterError: no optimizer is given, or a parameter is in two of them.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        num_repeated = len(parameters) - len(set(parameters))
        if not optimizers or num_repeated:
            message = (
                f"{num_repeated} of {len(parameters)} parameters are in several of the {len(optimizers)} optimizers. "
                "Pass at least one optimizer, and each parameter in only one of them."
            )
            raise ParameterError(message)
        self.optimizers = optimizers
        super().__init__([dict(group) for group in groups], {})
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for optimizer in optimizers:
            state.update(optimizer.state)
        self.state = state
        # The same dicts as in the optimizers, so that they use a learning rate that is set here.
        self.param_groups = groups
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every optimizer, in order."""
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into every optimizer."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group, because it is unknown which optimizer should get it.

        Raises:
            ParameterError: always, except while the constructor adds its own groups.
        """
        if len(self.param_groups) == sum(len(optimizer.param_groups) for optimizer in self.optimizers):
            message = "CombinedOptimizer takes no new groups. Add it to one of the optimizers, and combine them again."
            raise ParameterError(message)
        super().add_param_group(param_group)

    def _share(self) -> None:
        """Make every optimizer use this optimizer's state and groups."""
        start = 0
        for optimizer in self.optimizers:
            stop = start + len(optimizer.param_groups)
            optimizer.state, optimizer.param_groups = self.state, self.param_groups[start:stop]
            start = stop
