"""Batches whose samples are list entries, or elements of a custom class, in the engine."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.data import SampleList
from anybatch.testing import relative_error


class Listener(nn.Module):
    """Returns the mean square of a layer's output for each recording."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1).double()

    def forward(self, waves: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.layer(wave).square().mean() for wave in waves])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean over recordings."""
    errors: torch.Tensor = model(batch["waves"]) - batch["y"]
    return errors.square().mean()


@pytest.mark.parametrize("alike", [True, False])
def test_recordings_are_samples(alike: bool) -> None:
    """A list of 7 recordings in micro-batches of 3 has the full-batch gradient, for equal and different lengths."""
    torch.manual_seed(1)
    waves = [torch.randn(50 if alike else 20 + k, 2, dtype=torch.float64) for k in range(7)]
    batch = {"waves": SampleList(waves) if alike else waves, "y": torch.randn(7, dtype=torch.float64)}
    plain = Listener()
    loss(plain, batch).backward()
    model = Listener()
    with ab.Engine(
        model, torch.optim.SGD(model.parameters()), ab.mean_over_samples(loss), micro_batch_size=3
    ) as engine:
        found = engine.gradients(batch)
    assert relative_error(found, {name: p.grad for name, p in plain.named_parameters()}) <= 1e-12
