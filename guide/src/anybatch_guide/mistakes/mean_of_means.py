"""A mistake: a mean of means, in which every micro-batch has the same weight, regardless of its number of items."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch_guide.mistakes.windows import Pair, windows


def train(
    model: nn.Module,
    loader: Iterable[Pair],
    *,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    criterion: Callable[[Tensor, Tensor], Tensor],
    accumulation_steps: int,
    max_norm: float,
) -> None:
    """Train for one epoch."""
    for window in windows(loader, accumulation_steps):
        optimizer.zero_grad()
        for inputs, targets in window:
            loss = criterion(model(inputs), targets)
            (loss / accumulation_steps).backward()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
