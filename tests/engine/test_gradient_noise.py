"""Gradient noise measured in a run equals plain torch, micro-batch by micro-batch, on any number of ranks."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.gradient_noise import GradientNoise, NoiseEstimate, noise_parts
from anybatch.errors import CompositionError, UserError
from anybatch.parallel.data_parallel import DataParallel
from anybatch.parallel.fsdp import FSDP
from anybatch.parallel.strategy import Strategy
from anybatch.parallel.zero1 import Zero1
from tests.engine.cases import STRATEGIES, Batch, InMemory, classify, cut, vectors
from tests.raising import raises
from tests.ranks_fixture import Ranks

NUM_SAMPLES, SIZE = 23, 5
FURTHER: Mapping[str, Callable[[], Strategy]] = {"zero1": Zero1, "fsdp": FSDP, "data_parallel": DataParallel}
Parts = tuple[float, float]


def network() -> nn.Module:
    """Return a small classifier of two layers."""
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def by_hand(
    sizes: list[int],
    *,
    count: Callable[[Batch], float] = lambda batch: float(len(batch["x"])),
    loss: Callable[[Any, Batch], torch.Tensor] = classify,
    model: nn.Module | None = None,
) -> Parts:
    """Return squared norm and per-sample variance, from each micro-batch's gradient in plain torch."""
    model, batch, start, found = model or network(), vectors(NUM_SAMPLES), 0, []
    for size in sizes:
        piece = cut(batch, start, start + size)
        start += size
        if count(piece):
            parameters = list(model.parameters())
            gradients = torch.autograd.grad(loss(model, piece), parameters, materialize_grads=True)
            found.append((count(piece), torch.cat([gradient.flatten() for gradient in gradients])))
    total = sum(number for number, _ in found)
    shares = sum((number / total) ** 2 for number, _ in found)
    pieces = torch.stack([gradient * (number / total) for number, gradient in found])
    parts = noise_parts(pieces.sum(0).square().sum(), pieces.square().sum(), shares)
    return float(parts.squared_norm), float(NUM_SAMPLES * parts.variance)


def make_engine(strategy: str = "single", world: ab.World | None = None, **options: Any) -> ab.Engine:
    """Return an engine that measures every step, with micro-batches of five."""
    model = network()
    made = {**STRATEGIES, **FURTHER}[strategy]()
    options = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "loss": ab.mean_over_samples(classify),
        "noise": GradientNoise(every=1),
        "micro_batch_size": SIZE,
        "check_loss": False,
        **options,
    }
    optimizer, loss = options.pop("optimizer"), options.pop("loss")
    return ab.Engine(model, optimizer, loss, strategy=made, world=world, **options)


def measured(strategy: str) -> Parts:
    """Return squared norms and variances of one step on these ranks."""
    world = ab.World.from_environment()
    with make_engine(strategy, world) as engine:
        noise = engine.step(InMemory(vectors(NUM_SAMPLES))).noise
        assert noise is not None
        return noise.squared_norm, noise.variance


def assert_equal(found: Parts, expected: Parts) -> None:
    """Compare two pairs of numbers, up to float64 rounding."""
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("strategy", ["single", "all_reduce", "ddp", "zero1", "fsdp", "data_parallel"])
def test_one_rank(strategy: str, one_rank: Ranks) -> None:
    """Under every strategy, the noise measured in a ragged step equals plain torch."""
    found = one_rank.run(measured, strategy)[0] if strategy not in ("single", "data_parallel") else measured(strategy)

    assert_equal(found, by_hand([5, 5, 5, 5, 3]))


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp", "zero1", "fsdp"])
def test_two_ranks(strategy: str, two_ranks: Ranks) -> None:
    """On two ranks, the micro-batches of both are measured, and both ranks report bitwise equal numbers."""
    first, second = two_ranks.run(measured, strategy)

    assert first == second
    assert_equal(first, by_hand([5, 5, 2, 5, 5, 1]))


def masked_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean over samples that are not masked."""
    return F.cross_entropy(model(batch["x"]), masked(batch))


def masked(batch: Batch) -> torch.Tensor:
    """Return labels with all of class 0 masked."""
    return batch["y"].where(batch["y"] > 0, -100)


def num_unmasked(batch: Batch) -> float:
    """Return the number of unmasked samples."""
    return float((masked(batch) != -100).sum())


def test_noise_counts_match_the_loss() -> None:
    """Micro-batches are weighted by unmasked targets, and the estimate includes targets per sample."""
    loss = ab.mean_over_tokens(masked_loss, labels=masked, shift=False)
    noise = make_engine(loss=loss).step(InMemory(vectors(NUM_SAMPLES))).noise

    assert noise is not None
    assert_equal((noise.squared_norm, noise.variance), by_hand([5, 5, 5, 5, 3], count=num_unmasked, loss=masked_loss))
    assert noise.items == "tokens"
    assert float(noise.items_per_sample) == num_unmasked(vectors(NUM_SAMPLES)) / NUM_SAMPLES


def weights_after(noise: GradientNoise | None, steps: int = 4) -> list[torch.Tensor]:
    """Return the weights after some steps."""
    with make_engine(noise=noise, clip=0.5) as engine:
        for seed in range(steps):
            engine.step(InMemory(vectors(NUM_SAMPLES), seed=seed))
        assert isinstance(engine.model, nn.Module)
        return [parameter.detach().clone() for parameter in engine.model.parameters()]


def test_measuring_changes_nothing() -> None:
    """Measuring noise does not change the weights, bit for bit."""
    assert all(map(torch.equal, weights_after(GradientNoise(every=2)), weights_after(None)))


def test_a_resumed_run_continues(tmp_path: Path) -> None:
    """Averages are saved: a resumed run continues them bit for bit, and a run without them can begin to measure."""

    def moments(engine: ab.Engine, seeds: range) -> torch.Tensor:
        noise: NoiseEstimate | None = None
        for seed in seeds:
            noise = engine.step(InMemory(vectors(NUM_SAMPLES), seed=seed)).noise
        assert noise is not None
        return noise.moments

    through = make_engine()
    moments(through, range(3))
    through.save(tmp_path)
    expected = moments(through, range(3, 6))
    resumed, silent = make_engine(), make_engine(noise=None)
    resumed.load(tmp_path)
    silent.load(tmp_path)
    silent.save(tmp_path / "silent")
    begins = make_engine()
    begins.load(tmp_path / "silent")

    assert torch.equal(moments(resumed, range(3, 6)), expected)
    assert begins.step(InMemory(vectors(NUM_SAMPLES))).noise is not None


class Normed(nn.Sequential):
    """A classifier with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def test_refused() -> None:
    """Measuring noise raises an error if micro-batches are not independent; frozen BatchNorm is accepted."""

    def engine(model: nn.Module, loss: Any, **options: Any) -> ab.Engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return ab.Engine(model, optimizer, loss, **{"noise": GradientNoise(), "micro_batch_size": SIZE, **options})

    mean = ab.mean_over_samples(classify)
    with raises(CompositionError, "noise"):
        engine(Normed(), mean)
    engine(Normed(), mean, norms="freeze").close()
    with raises(CompositionError, "noise"):
        engine(network(), ab.joint(lambda model, batch: model(batch["x"]), lambda _, outputs: outputs.square().mean()))
    with raises(CompositionError, "noise"):
        engine(network(), ab.sum_of(classify, one=ab.samples(), other=ab.counted(lambda batch: batch["y"].sum())))
    with raises(CompositionError, "noise"):
        engine(network(), mean, micro_batch_size=ab.token_budget(64))
    with raises(CompositionError, "noise"):
        engine(network(), ab.sum_over_samples(classify))
    with pytest.raises(UserError):
        GradientNoise(decay=1.0)


class Forked(nn.Module):
    """A layer for all micro-batches, and one for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.often, self.rare = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.often(x)
        return found + self.rare(x) if x[0, 0] > 0 else found


def test_parameters_that_a_micro_batch_skips() -> None:
    """A layer that a micro-batch skips has norm 0 there."""
    model = Forked()
    expected = by_hand([5, 5, 5, 5, 3], model=model)
    optimizer, mean = torch.optim.SGD(model.parameters(), lr=0.1), ab.mean_over_samples(classify)
    noise = GradientNoise(every=1)
    engine = ab.Engine(model, optimizer, mean, micro_batch_size=SIZE, noise=noise, check_loss=False)

    measured = engine.step(InMemory(vectors(NUM_SAMPLES))).noise

    assert measured is not None
    assert_equal((measured.squared_norm, measured.variance), expected)
