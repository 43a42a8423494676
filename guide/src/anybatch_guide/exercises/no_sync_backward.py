"""A loop with a bug: `no_sync` contains only the backward, where it has no effect."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

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
        for number, (inputs, targets) in enumerate(window, start=1):
            is_last = number == len(window)
            loss = criterion(model(inputs), targets)
            with nullcontext() if is_last else model.no_sync():
                (loss * share(targets, window)).backward()
        optimizer.step()
