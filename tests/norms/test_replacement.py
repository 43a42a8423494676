"""`replaced` swaps BatchNorm for per-sample layers and keeps all that can be kept."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import anybatch as ab
from anybatch.errors import UserError
from anybatch.norms import replaced
from anybatch.norms.layers import Kind, default_groups
from anybatch.testing import assert_same_gradients
from tests.norms.residual import ResidualNetwork, classify, images, native, network
from tests.raising import raises

KINDS: list[Kind] = ["group_norm", "layer_norm"]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_independent_after_replacement(kind: Kind) -> None:
    """The accumulated gradient of the new model equals its full-batch gradient."""
    model, batch = replaced(network(width=8), kind).model, images()
    expected, _ = native(model, batch)
    expected = {name: gradient.clone() for name, gradient in expected.items() if gradient is not None}
    with ab.Engine(
        model, torch.optim.SGD(model.parameters()), ab.mean_over_samples(classify), micro_batch_size=4
    ) as engine:
        assert_same_gradients(engine.gradients(batch), expected)
        assert "equality" not in engine.decisions


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_kept(kind: Kind) -> None:
    """New layers keep weight, bias, eps, mode and requires_grad; the old model is unchanged."""
    old = ResidualNetwork(width=8)
    for number, module in enumerate(old.modules()):
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.weight)
            module.eps = 1e-3 * (number + 1)
    old.norm.eval()
    old.norm.bias.requires_grad_(False)
    found = replaced(old, kind)

    assert len(found.layers) == 7
    assert "7 layers" in found.retrain
    for name in found.layers:
        before, after = old.get_submodule(name), found.model.get_submodule(name)
        assert isinstance(before, _BatchNorm)
        assert not isinstance(after, _BatchNorm)
        assert isinstance(after.weight, torch.Tensor)
        assert torch.equal(after.weight, before.weight)
        assert after.weight is not before.weight
        assert after.eps == before.eps
        assert after.training is before.training
        assert after.bias.requires_grad is before.bias.requires_grad


def test_a_shared_layer_stays_shared_and_a_model_may_be_a_layer() -> None:
    """A layer used twice is replaced by one shared layer; a bare BatchNorm is replaced too."""
    norm = nn.BatchNorm1d(8)
    model = replaced(nn.Sequential(norm, nn.Linear(8, 8), norm), "group_norm").model
    assert model.get_submodule("0") is model.get_submodule("2")
    assert isinstance(replaced(norm, "layer_norm").model, nn.GroupNorm)


def test_groups() -> None:
    """Groups are at most 32, of at least 4 channels; a non-divisor and an unknown kind are refused."""
    assert {c: default_groups(c) for c in (3, 8, 16, 20, 96, 256)} == {3: 1, 8: 2, 16: 4, 20: 5, 96: 24, 256: 32}
    with raises(UserError, "not_a_divisor"):
        replaced(nn.Sequential(nn.BatchNorm1d(8)), "group_norm", num_groups=3)
    with raises(UserError, "unknown_kind"):
        replaced(nn.BatchNorm1d(8), "batch_norm")  # type: ignore[arg-type]
