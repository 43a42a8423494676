"""Models that use dropout in every form, and the same in plain arithmetic under masks by hand."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anybatch as ab
from anybatch.core.randomness import BatchKey
from tests.engine.cases import (
    NUM_CLASSES,
    NUM_FEATURES,
    classify,
)
from tests.engine.masks_by_hand import mask

SEED, P, NUM_SAMPLES = 11, 0.4, 15
MICRO_BATCH_SIZES = (1, 7, None)
TOLERANCE = 1e-12
Layer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A form of dropout, and its plain meaning.

    Attributes:
        drop: builds the dropout layer.
        shape: of one sample's hidden values.
        arrange: calls the layer on the hidden values of all samples, (samples, *shape).
        by_channel: whole channels are dropped.
        around: calls the block that contains the layer.
    """

    drop: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 6)
    arrange: Callable[[Layer, torch.Tensor], torch.Tensor] = lambda drop, hidden: drop(hidden)
    by_channel: bool = False
    around: Callable[[Layer, torch.Tensor], torch.Tensor] = lambda block, hidden: block(hidden)


class Functional(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[..., torch.Tensor], *args: Any) -> None:
        super().__init__()
        self.function, self.args = function, args

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.function(hidden, *self.args)
        return found


def on_a_copy(drop: Layer, hidden: torch.Tensor) -> torch.Tensor:
    """Apply dropout to a copy, because it may be in place and tanh needs its output."""
    return drop(hidden * 1.0)


WAYS: Mapping[str, Way] = {
    "Dropout": Way(drop=lambda: nn.Dropout(P)),
    "Dropout in place": Way(drop=lambda: nn.Dropout(P, inplace=True), arrange=on_a_copy),
    "Dropout1d": Way(drop=lambda: nn.Dropout1d(P), by_channel=True),
    "Dropout2d": Way(drop=lambda: nn.Dropout2d(P), shape=(4, 3, 2), by_channel=True),
    "Dropout3d": Way(drop=lambda: nn.Dropout3d(P), shape=(4, 1, 3, 2), by_channel=True),
    "F.dropout2d": Way(drop=lambda: Functional(F.dropout2d, P), shape=(4, 3, 2), by_channel=True),
    "an odd number of one axis": Way(drop=lambda: nn.Dropout(P), shape=(7,)),
    "flattened": Way(
        drop=lambda: nn.Dropout(P), arrange=lambda drop, hidden: drop(hidden.flatten(0, 1)).view_as(hidden)
    ),
    "checkpointed": Way(
        drop=lambda: nn.Dropout(P), around=lambda block, hidden: checkpoint(block, hidden, use_reentrant=False)
    ),
}


class Block(nn.Module):
    """A linear layer with dropout."""

    def __init__(self, width: int, drop: nn.Module, arrange: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.drop = drop
        self.arrange = arrange

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.arrange(self.drop, torch.tanh(self.linear(hidden)))


class Network(nn.Module):
    """Calls one block twice, so that a layer draws two masks in one forward."""

    def __init__(self, way: Way, drop: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.way = way
        self.first = nn.Linear(NUM_FEATURES, math.prod(way.shape))
        plain = isinstance(drop, ByHand)
        self.block = Block(way.shape[-1], drop, WAYS["Dropout"].arrange if plain else way.arrange)
        self.around = WAYS["Dropout"].around if plain else way.around
        self.out = nn.Linear(math.prod(way.shape), NUM_CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).view(len(x), *self.way.shape)
        for _ in range(2):
            hidden = self.around(self.block, hidden)
        logits: torch.Tensor = self.out(hidden.flatten(1))
        return logits


class ByHand(nn.Module):
    """Applies masks computed in plain Python, by the formulas of torch's documentation."""

    def __init__(self, way: Way, num_samples: int) -> None:
        super().__init__()
        self.way = way
        self.num_samples = num_samples
        self.start(0)

    def start(self, step: int) -> None:
        """Begin a step: count calls from 0."""
        self.key = BatchKey(SEED, step, range(self.num_samples))
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        way = self.way
        kept = mask(self.key, self.calls, way.shape[:1] if way.by_channel else way.shape, P)
        kept = kept.reshape(*kept.shape, *(1,) * (hidden.dim() - kept.dim())).double()
        self.calls += 1
        return hidden * kept / (1 - P)


def make_engine(network: nn.Module, **options: Any) -> ab.Engine:
    """Return an engine with plain SGD."""
    options = {"loss": ab.mean_over_samples(classify), "rng": "per_sample", "world": ab.World(), **options}
    return ab.Engine(network, torch.optim.SGD(network.parameters(), lr=0.1), **options)
