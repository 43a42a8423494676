"""`find_coupling_modules` finds the modules that couple samples, custom ones too."""

import pytest
import torch
from torch import nn

from anybatch.norms.layers import find_coupling_modules


class Centred(nn.Module):
    """Subtracts the mean of the batch: a custom normalisation."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values - values.mean(0, keepdim=True)


class Ranked(nn.Module):
    """Scales each sample by its norm relative to the others; its inner layer couples no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = self.inside(values) * values.norm(dim=1).softmax(0)[:, None]
        return gated


class Words(nn.Module):
    """Word vectors, with samples and positions flattened before the layers."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.norm = norm

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = self.norm(self.words(words).flatten(0, 1))
        return inside.view(*words.shape, -1).mean(1)


def tried(model: nn.Module, batch: torch.Tensor) -> dict[str, float]:
    """Return the modules that couple the samples of a batch."""
    return find_coupling_modules(model, lambda: model(batch), len(batch))


INNOCENT = [
    nn.LayerNorm(6),
    nn.GroupNorm(2, 6),
    nn.Dropout(0.5),
    nn.GELU(),
    nn.Linear(6, 6),
    nn.InstanceNorm1d(6),
    nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(inplace=True)),
    nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
]


def test_custom_layers_are_found() -> None:
    """Custom layers that couple samples are found at the innermost level, also with flattened axes."""
    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Sequential(nn.GELU(), Ranked()), nn.Linear(6, 2))
    assert set(tried(model, torch.randn(7, 6))) == {"1", "2.1"}
    assert set(tried(Words(Centred()), torch.randint(0, 9, (7, 4)))) == {"norm"}


@pytest.mark.parametrize("layer", INNOCENT, ids=lambda layer: type(layer).__name__)
def test_per_sample_layers_are_not_reported(layer: nn.Module) -> None:
    """Per-sample layers are not reported, even if they draw random numbers or work in place."""
    inputs = (
        torch.randn(7, 3, 6) if isinstance(layer, (nn.TransformerEncoderLayer, nn.LayerNorm)) else torch.randn(7, 6)
    )
    if isinstance(layer, nn.InstanceNorm1d):
        inputs = torch.randn(7, 6, 5)
    assert tried(nn.Sequential(layer), inputs) == {}
