"""A training loop in three versions: without accumulation, with the usual three changed lines, and correct."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch_guide.mistakes.windows import Pair, share, windows

Criterion = Callable[[Tensor, Tensor], Tensor]


def whole_batch(model: nn.Module, loader: Iterable[Pair], optimizer: Optimizer, criterion: Criterion) -> None:
    """Train for one epoch."""
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def three_lines(
    model: nn.Module, loader: Iterable[Pair], optimizer: Optimizer, criterion: Criterion, accumulation_steps: int
) -> None:
    """Train for one epoch."""
    for number, (inputs, targets) in enumerate(loader, start=1):
        loss = criterion(model(inputs), targets)
        (loss / accumulation_steps).backward()
        if number % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def right(
    model: nn.Module, loader: Iterable[Pair], optimizer: Optimizer, criterion: Criterion, accumulation_steps: int
) -> None:
    """Train for one epoch."""
    for window in windows(loader, accumulation_steps):
        for inputs, targets in window:
            loss = criterion(model(inputs), targets)
            (loss * share(targets, window)).backward()
        optimizer.step()
        optimizer.zero_grad()
