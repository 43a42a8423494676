"""Recomputed BatchNorm statistics equal the statistics of the full data set, for every cut."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import anybatch as ab
from anybatch.errors import DataError
from anybatch.norms import recompute_statistics
from anybatch.norms.layers import Ranks
from tests.engine.cases import share_bounds
from tests.norms.residual import buffers_of, images, largest_difference, network
from tests.ranks_fixture import Ranks as Pool

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
