"""Options of DDP: compressed messages, and gradients as views of buckets."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.ddp import DDP
from anybatch.records import ReductionRecord
from anybatch.testing import relative_error
from tests.engine.cases import Batch, InMemory
from tests.ranks_fixture import Ranks

SAMPLES = 22
NUM_NUMBERS = 5 * 9 + 9 + 9 * 3 + 4
ROUNDED = 2.0**-9
"""Relative error of one rounding to bf16, which keeps 8 significant bits."""


class Records:
    """An observer that records the reductions."""

    def __init__(self) -> None:
        self.handed: list[tuple[str, int]] = []

    def observe(self, record: object) -> None:
        """Record the begin of a reduction."""
        if isinstance(record, ReductionRecord) and record.event == "begin":
            self.handed.append((record.collective, record.num_bytes))


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with 89 used elements and one unused parameter."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3, bias=False))
    model.register_parameter("idle", nn.Parameter(torch.ones(4)))
    return model.to(dtype)


def loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["x"]).float(), batch["y"])


def data(seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Return vectors and labels."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(SAMPLES, 5, generator=generator).to(dtype),
        "y": torch.randint(0, 3, (SAMPLES,), generator=generator),
    }


STRATEGIES: Mapping[str, Callable[[], DDP]] = {
    "compressed": lambda: DDP(compression="bf16"),
    "views": lambda: DDP(gradient_as_bucket_view=True),
}


def steps(name: str) -> tuple[float, list[float], dict[str, int], str]:
    """Run on every rank: return the gradient error, the weights after two steps, the bytes and the decision."""
    model, plain, observer = network(), network().double(), Records()
    loss(plain, data(dtype=torch.float64)).backward()
    expected = {key: p.grad for key, p in plain.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    with ab.Engine(
        model,
        sgd,
        ab.mean_over_samples(loss),
        micro_batch_size=3,
        strategy=STRATEGIES[name](),
        world=ab.World.from_environment(),
        observer=observer,
    ) as engine:
        first = engine.gradients(InMemory(data()))
        kept = {key: None if value is None else value.clone() for key, value in first.items()}
        handed: dict[str, int] = {}
        for collective, num_bytes in observer.handed:
            handed[collective] = handed.get(collective, 0) + num_bytes
        for seed in range(2):
            engine.step(InMemory(data(seed)))
        assert relative_error(first, kept) == 0.0  # returned gradients must not be views
        told = engine.decisions.get("compression", "")
    assert torch.equal(model.get_parameter("idle"), torch.ones(4))  # no gradient, so no weight decay
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return relative_error(first, expected), weights, handed, told


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_equal_one_device(name: str, two_ranks: Ranks, three_ranks: Ranks) -> None:
    """Accumulated gradients are rounded once per rank, unused parameters stay unchanged, and replicas are equal."""
    for ranks in (two_ranks, three_ranks):
        found = ranks.run(steps, name)
        compressed = name == "compressed"
        for error, weights, handed, told in found:
            assert error <= (ranks.world_size * ROUNDED if compressed else 1e-6)
            assert (error > ROUNDED / 8) is compressed
            assert weights == found[0][1]
            assert ("once per rank" in told) is compressed
            assert handed == {"all_reduce": (2 if compressed else 4) * NUM_NUMBERS}


def refused() -> None:
    """Run on every rank: build an engine that compresses float64 gradients."""
    model, strategy = network(torch.float64), DDP(compression="bf16")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CompositionError):
        ab.Engine(model, sgd, ab.mean_over_samples(loss), strategy=strategy, world=ab.World.from_environment())


def test_float64_is_refused(two_ranks: Ranks) -> None:
    """Compression refuses float64 parameters, whose precision would be lost."""
    two_ranks.run(refused)


def test_arguments() -> None:
    """An unknown compression is refused."""
    unknown: Any = "int8"
    with pytest.raises(UserError):
        DDP(compression=unknown)
