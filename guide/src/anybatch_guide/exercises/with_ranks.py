"""A loop with a bug: it runs on several ranks with one reduction per step, but never zeroes gradients."""

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
        for number, (inputs, targets) in enumerate(window, start=1):
            is_last = number == len(window)
            with nullcontext() if is_last else model.no_sync():
                loss = criterion(model(inputs), targets)
                (loss * share(targets, window)).backward()
        optimizer.step()
