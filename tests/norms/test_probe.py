"""`coupling_layers` finds the layers that couple samples, also custom ones, and changes nothing."""

import pytest
import torch
from torch import nn

from anybatch.norms import coupling_layers
from tests.norms.residual import ResidualNetwork, buffers_of, images


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


def test_every_batch_norm_is_found_by_type() -> None:
    """All BatchNorm layers of a network are found, frozen ones too, and no others."""
    model = ResidualNetwork().double()
    model.get_submodule("blocks.0.norm1").eval()
    found = coupling_layers(model, images(7)["x"])

    assert set(found) == {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}


def test_layers_of_ones_own_are_found_by_trying() -> None:
    """Custom layers that couple samples are found at the innermost level, also with flattened axes."""
    model = nn.Sequential(nn.Linear(6, 6), Centred(), nn.Sequential(nn.GELU(), Ranked()), nn.Linear(6, 2))
    found = coupling_layers(model, torch.randn(7, 6))

    assert set(found) == {"1", "2.1"}
    assert "Centred: with one sample changed, the output of others moves by" in found["1"]
    assert set(coupling_layers(Words(Centred()), torch.randint(0, 9, (7, 4)))) == {"norm"}


@pytest.mark.parametrize("layer", INNOCENT, ids=lambda layer: type(layer).__name__)
def test_layers_that_look_at_one_sample_are_not_named(layer: nn.Module) -> None:
    """Per-sample layers are not reported, even if they draw random numbers or work in place."""
    inputs = (
        torch.randn(7, 3, 6) if isinstance(layer, (nn.TransformerEncoderLayer, nn.LayerNorm)) else torch.randn(7, 6)
    )
    if isinstance(layer, nn.InstanceNorm1d):
        inputs = torch.randn(7, 6, 5)
    assert coupling_layers(nn.Sequential(layer), inputs) == {}


def test_nothing_is_changed_by_looking() -> None:
    """Parameters, gradients, buffers, training modes and random states are unchanged after the search."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), Centred()).eval()
    model[2].train()
    before, parameters = buffers_of(model), [parameter.clone() for parameter in model.parameters()]
    state = torch.get_rng_state()
    coupling_layers(model, torch.randn(7, 6, generator=torch.Generator().manual_seed(0)))

    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in buffers_of(model).items())
    assert all(torch.equal(one, other) for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model.modules()] == [False, False, False, True, False]
    assert not any(module._forward_pre_hooks for module in model.modules())  # noqa: SLF001 (torch has no public query)
