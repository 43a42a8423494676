"""Shared code of the loops: windows of micro-batches, and the weight of each micro-batch."""

import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor

from anybatch_guide.tasks.task import IGNORED

Pair = tuple[Tensor, Tensor]


def windows(loader: Iterable[Pair], accumulation_steps: int) -> Iterator[list[Pair]]:
    """Yield the micro-batches of each optimizer step; the last window of an epoch may have fewer."""
    micro_batches = iter(loader)
    while window := list(itertools.islice(micro_batches, accumulation_steps)):
        yield window


def share(targets: Tensor, window: list[Pair]) -> float:
    """Return the share of a micro-batch: its items divided by the items of the window."""
    return items(targets) / sum(items(others) for _, others in window)


def items(targets: Tensor) -> int:
    """Return the number of targets that are not ignored."""
    return int((targets != IGNORED).sum())
