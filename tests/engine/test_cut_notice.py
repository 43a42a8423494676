"""The engine warns if BatchNorm makes the gradient depend on the cut, unless the user chose that."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from tests.engine.cases import Batch, vectors
from tests.raising import warns


def of_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return a mean over samples."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def stepped(*, frozen: bool = False, **options: Any) -> None:
    """Make two steps with a BatchNorm layer."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    model[1].train(not frozen)
    options = {"micro_batch_size": 4} | options
    optimizer = torch.optim.SGD(model.parameters())
    with ab.Engine(model, optimizer, ab.mean_over_samples(of_samples), world=ab.World(), **options) as engine:
        for _ in range(2):
            engine.step(vectors(12))


def test_the_default_warns_once() -> None:
    """The default policy causes one warning that names the alternatives; a second one would be an error here."""
    with warns("batch_norm_by_micro_batch"):
        stepped()


@pytest.mark.parametrize(
    "options",
    [
        {"norms": "keep"},
        {"norms": "exact"},
        {"norms": "freeze"},
        {"norms": "sync"},
        {"frozen": True},
        {"micro_batch_size": 12},
    ],
)
def test_no_warning_if_chosen_or_without_effect(options: dict[str, Any]) -> None:
    """A chosen policy, a frozen layer and an uncut batch cause no warning."""
    stepped(**options)
