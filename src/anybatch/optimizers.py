"""Several optimizers over parts of one model, as one: Muon for matrices beside AdamW for the rest, say."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from anybatch.errors import ParameterError


class CombinedOptimizer(Optimizer):
    """Optimizers over different parameters that step together, where one optimizer is expected.

    The plain loop: `for optimizer in optimizers: optimizer.step()`. Parameter groups are those of the optimizers, one
    after the other, so a scheduler sets the learning rate of each in proportion to its own.

    ```python
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = CombinedOptimizer(torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=3e-4))
    ```

    Args:
        optimizers: at least one; no parameter is in two of them. From here on they share one state, and belong to this.

    Raises:
        ParameterError: there is none, or a parameter is in two of them.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        given = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
        if not optimizers or len(set(given)) < len(given):
            message = (
                f"CombinedOptimizer got {len(optimizers)} optimizers with {len(given)} parameters, of which "
                f"{len(given) - len(set(given))} are in several. Give at least one, and each parameter to one of them."
            )
            raise ParameterError(message)
        self.optimizers = optimizers
        super().__init__([dict(group) for one in optimizers for group in one.param_groups], {})
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for one in optimizers:
            state.update(one.state)
        self.state = state
        # The very groups of the optimizers, so that a learning rate that is set here is the one that they use.
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every optimizer, in order."""
        loss = None if closure is None else closure()
        for one in self.optimizers:
            one.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, in every optimizer."""
        super().load_state_dict(state_dict)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups, once made: which optimizer they would belong to is not known.

        Raises:
            ParameterError: always, but while it is made.
        """
        if len(self.param_groups) == sum(len(one.param_groups) for one in self.optimizers):
            message = "add the group to one of the optimizers, and combine them again."
            raise ParameterError(message)
        super().add_param_group(param_group)

    def _share(self) -> None:
        """Have every optimizer use this one's state and groups."""
        first = 0
        for one in self.optimizers:
            last = first + len(one.param_groups)
            one.state, one.param_groups = self.state, self.param_groups[first:last]
            first = last
