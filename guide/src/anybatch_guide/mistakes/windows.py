"""What every loop here stands on: micro-batches, a window of them at a time, and how much each of them counts."""

import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor

from anybatch_guide.tasks.task import IGNORED

Pair = tuple[Tensor, Tensor]


def windows(loader: Iterable[Pair], accumulation_steps: int) -> Iterator[list[Pair]]:
    """Yield the micro-batches of each optimizer step; the last window of an epoch may hold fewer."""
    micro_batches = iter(loader)
    while window := list(itertools.islice(micro_batches, accumulation_steps)):
        yield window


def share(targets: Tensor, window: list[Pair]) -> float:
    """Return how much of its window a micro-batch is: its items, divided by those of all of them."""
    return items(targets) / sum(items(others) for _, others in window)


def items(targets: Tensor) -> int:
    """Return how many targets count: all but those that are ignored."""
    return int((targets != IGNORED).sum())
