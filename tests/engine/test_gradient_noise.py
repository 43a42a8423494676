"""Gradient noise measured in a run equals plain torch, micro-batch by micro-batch, on any number of ranks."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.core.gradient_noise import NoiseEstimate, noise_parts
from anybatch.engine.gradient_noise import GradientNoise
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
Parts = tuple[dict[str, float], dict[str, float]]


def network() -> nn.Module:
    """Return a small classifier of two layers."""
    torch.manual_seed(20)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def gradient_of(model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradient of a loss by parameter."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss(model, batch), parameters), strict=True))


def by_hand(
    sizes: list[int],
    *,
    count: Callable[[Batch], float] = lambda batch: float(len(batch["x"])),
    loss: Callable[[Any, Batch], torch.Tensor] = classify,
    scale: Mapping[str, torch.Tensor] | None = None,
) -> Parts:
    """Return squared norm and per-sample variance by layer, from each micro-batch's gradient in plain torch."""
    model, batch, start, found = network(), vectors(NUM_SAMPLES), 0, []
    for size in sizes:
        piece = cut(batch, start, start + size)
        start += size
        if count(piece):
            gradient = gradient_of(model, piece, loss)
            found.append((count(piece), {name: g / (scale[name] if scale else 1) for name, g in gradient.items()}))
    total = sum(number for number, _ in found)
    shares = sum((number / total) ** 2 for number, _ in found)
    norms, variances = {}, {}
    rows = {"all parameters": list(found[0][1]), "0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}
    for row, names in rows.items():
        pieces = [torch.cat([g[name].flatten() for name in names]) * (number / total) for number, g in found]
        of_parts = torch.stack([piece.square().sum() for piece in pieces]).sum()
        parts = noise_parts(torch.stack(pieces).sum(0).square().sum(), of_parts, shares)
        norms[row], variances[row] = float(parts.squared_norm), float(NUM_SAMPLES * parts.variance)
    return norms, variances


def make_engine(strategy: str = "single", world: ab.World | None = None, **options: Any) -> ab.Engine:
    """Return an engine that measures every step, with micro-batches of five."""
    model = network()
    made = {**STRATEGIES, **FURTHER}[strategy]()
    options = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "loss": ab.mean_over_samples(classify),
        "noise": GradientNoise(every=1, by="layer"),
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
        return noise.squared_norms, noise.variances


def assert_equal(found: Parts, expected: Parts) -> None:
    """Compare row by row, up to float64 rounding."""
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-10)


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


def test_parts_count_what_the_loss_counts() -> None:
    """Micro-batches are weighted by unmasked targets, and the estimate includes targets per sample."""
    loss = ab.mean_over_tokens(masked_loss, labels=masked, shift=False)
    noise = make_engine(loss=loss).step(InMemory(vectors(NUM_SAMPLES))).noise

    assert noise is not None
    assert_equal((noise.squared_norms, noise.variances), by_hand([5, 5, 5, 5, 3], count=num_unmasked, loss=masked_loss))
    assert noise.items == "tokens"
    assert float(noise.items_per_sample) == num_unmasked(vectors(NUM_SAMPLES)) / NUM_SAMPLES


def test_preconditioned() -> None:
    """Preconditioned noise divides gradients by Adam's denominator; before Adam's first step nothing is measured."""
    engine = make_engine(
        optimizer=lambda named: torch.optim.Adam(named, lr=0.0, eps=1e-3),
        noise=GradientNoise(every=1, by="layer", preconditioned=True),
    )
    batch = InMemory(vectors(NUM_SAMPLES))
    first, second = engine.step(batch).noise, engine.step(batch).noise
    whole = gradient_of(network(), vectors(NUM_SAMPLES), classify)
    scale = {name: gradient.abs() + 1e-3 for name, gradient in whole.items()}  # after one step, corrected v is g^2

    assert first is not None
    assert second is not None
    assert math.isnan(first.scale)
    assert_equal((second.squared_norms, second.variances), by_hand([5, 5, 5, 5, 3], scale=scale))


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


def test_a_resumed_run_goes_on(tmp_path: Path) -> None:
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
    with raises(CompositionError, "preconditioner"):
        engine(network(), mean, noise=GradientNoise(preconditioned=True))
    with pytest.raises(UserError):
        GradientNoise(decay=1.0)
    with pytest.raises(UserError):
        GradientNoise(by="block")  # type: ignore[arg-type]


class Forked(nn.Module):
    """A layer for all micro-batches, and one for some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.often, self.rare = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.often(x)
        return found + self.rare(x) if x[0, 0] > 0 else found


def test_parameters_that_a_micro_batch_leaves_out() -> None:
    """A layer that a micro-batch skips has norm 0 there."""
    batch, model = vectors(NUM_SAMPLES), Forked()
    starts = range(0, NUM_SAMPLES, SIZE)
    shares = [min(SIZE, NUM_SAMPLES - start) / NUM_SAMPLES for start in starts]
    found = []
    for start, share in zip(starts, shares, strict=True):
        loss = classify(model, cut(batch, start, start + SIZE)) * share
        gradients = torch.autograd.grad(loss, list(model.rare.parameters()), allow_unused=True)
        found.append([one for one in gradients if one is not None])
    of_parts = sum(float(one.square().sum()) for gradients in found for one in gradients)
    whole = [torch.stack(pieces).sum(0) for pieces in zip(*filter(None, found), strict=True)]
    of_sum = sum(float(one.square().sum()) for one in whole)
    optimizer, noise = torch.optim.SGD(model.parameters(), lr=0.1), GradientNoise(every=1, by="layer")
    mean = ab.mean_over_samples(classify)

    engine = ab.Engine(model, optimizer, mean, micro_batch_size=SIZE, noise=noise, check_loss=False)
    measured = engine.step(InMemory(batch)).noise

    assert measured is not None
    assert [] in found
    expected = (of_sum - of_parts) / (1 - sum(share**2 for share in shares))
    assert measured.squared_norms["rare"] == pytest.approx(expected, rel=1e-10)
