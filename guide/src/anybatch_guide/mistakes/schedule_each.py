"""A mistake: the scheduler steps after every micro-batch, so the learning rate falls N times too fast."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anybatch_guide.mistakes.windows import Pair, share, windows


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
            (loss * share(targets, window)).backward()
            scheduler.step()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
