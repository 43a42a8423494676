"""A usual training loop."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def train(
    model: nn.Module, optimizer: Optimizer, loss: Loss, batches: Iterable[Batch], tell: Callable[..., None]
) -> None:
    """Make a step on each batch."""
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        tell(value.item())
