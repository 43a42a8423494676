"""A loop with a bug: losses are not divided, so the gradient grows with the number of micro-batches."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch_guide.mistakes.windows import Pair


def train(
    model: nn.Module,
    loader: Sequence[Pair],
    *,
    optimizer: Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor],
    accumulation_steps: int,
) -> None:
    """Train for one epoch."""
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(loader, start=1):
        loss = criterion(model(inputs), targets)
        loss.backward()
        if number % accumulation_steps == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
