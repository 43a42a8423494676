"""A loop with a bug: every micro-batch runs under `no_sync`, so gradients are never reduced."""

from collections.abc import Callable, Iterable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from anybatch_guide.mistakes.windows import Pair, share, windows


def train(
    model: DistributedDataParallel,
    loader: Iterable[Pair],
    *,
    optimizer: Optimizer,
    criterion: Callable[[Tensor, Tensor], Tensor],
    accumulation_steps: int,
) -> None:
    """Train for one epoch."""
    for window in windows(loader, accumulation_steps):
        optimizer.zero_grad()
        for inputs, targets in window:
            with model.no_sync():
                loss = criterion(model(inputs), targets)
                (loss * share(targets, window)).backward()
        optimizer.step()
