"""`replaced` swaps BatchNorm for per-sample layers and keeps all that can be kept."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import anybatch as ab
from anybatch.errors import DataError, UserError
from anybatch.norms import coupling_layers, recompute_statistics, replaced
from anybatch.norms.layers import Ranks
from anybatch.norms.replacement import Kind, default_groups
from anybatch.testing import assert_same_gradients
from tests.engine.cases import share_bounds
from tests.norms.residual import ResidualNetwork, buffers_of, classify, images, largest_difference, native, network
from tests.raising import raises
from tests.ranks_fixture import Ranks as Pool

KINDS: list[Kind] = ["group_norm", "layer_norm", "rms_norm"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_depends_on_another_afterwards(kind: Kind) -> None:
    """The new model couples no samples, and its accumulated gradient equals the full-batch gradient."""
    model, batch = replaced(network(width=8), kind).model, images()
    assert coupling_layers(model, batch["x"]) == {}
    expected, _ = native(model, batch)
    expected = {name: gradient.clone() for name, gradient in expected.items() if gradient is not None}
    with ab.Engine(
        model, torch.optim.SGD(model.parameters()), ab.mean_over_samples(classify), micro_batch_size=4
    ) as engine:
        assert_same_gradients(engine.gradients(batch), expected)
        assert "equality" not in engine.decisions


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_taken_over(kind: Kind) -> None:
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


NUM_IMAGES = 23


def layer_by_layer(model: nn.Module, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the buffers after setting each layer's statistics from its inputs over all data, in plain PyTorch."""
    model.eval()
    seen: list[torch.Tensor] = []
    for layer in [module for module in model.modules() if isinstance(module, _BatchNorm)]:
        handle = layer.register_forward_pre_hook(lambda _module, args: seen.append(args[0].transpose(0, 1).flatten(1)))
        with torch.no_grad():
            model(inputs)
        handle.remove()
        assert isinstance(layer.running_mean, torch.Tensor)
        assert isinstance(layer.running_var, torch.Tensor)
        values = seen.pop()
        layer.running_mean.copy_(values.mean(1))
        layer.running_var.copy_(values.var(1))
    return buffers_of(model)


@pytest.mark.parametrize("sizes", [[23], [1] * 23, [5, 5, 5, 5, 3], [20, 3]])
def test_statistics_are_those_of_the_data(sizes: Sequence[int]) -> None:
    """Running mean and unbiased variance match each layer's inputs over all data, for any batch sizes."""
    inputs = images(NUM_IMAGES)["x"]
    expected = layer_by_layer(network(), inputs)
    model = network()
    names = recompute_statistics(model, inputs.split(list(sizes)))

    assert largest_difference(buffers_of(model), expected) < 1e-12
    assert names[0] == "norm"
    assert len(names) == 7
    assert model.training


def own_statistics() -> dict[str, torch.Tensor]:
    """Run on every rank: recompute statistics over the parts of all ranks, in batches of 4."""
    world = ab.World.from_environment()
    start, stop = share_bounds(NUM_IMAGES, [2, 1])[world.rank]
    model = network()

    def total(tensor: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(tensor)
        return tensor

    recompute_statistics(model, images(NUM_IMAGES)["x"][start:stop].split(4), ranks=Ranks(world.size, total))
    return buffers_of(model)


def test_statistics_are_those_of_all_ranks(two_ranks: Pool) -> None:
    """With uneven parts on two ranks, both get exactly the statistics of all data."""
    expected = layer_by_layer(network(), images(NUM_IMAGES)["x"])
    first, second = two_ranks.run(own_statistics)
    assert largest_difference(first, expected) < 1e-12
    assert largest_difference(first, second) == 0.0


def test_what_cannot_be_read_again_is_refused() -> None:
    """An iterator and an empty data set are refused, and the statistics stay unchanged."""
    model = network()
    before = buffers_of(model)
    given: list[Any] = [iter([images()["x"]]), []]
    for batches in given:
        with pytest.raises(DataError):
            recompute_statistics(model, batches)
    assert largest_difference(buffers_of(model), before) == 0.0
    assert not any(module._forward_pre_hooks for module in model.modules())  # noqa: SLF001 (torch has no public query)
