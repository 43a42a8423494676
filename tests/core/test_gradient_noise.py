"""The noise of gradients: unbiased estimates, running averages, and an interval with the right coverage."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from anybatch.core.gradient_noise import (
    NUM_MOMENTS,
    BatchCost,
    NoiseEstimate,
    NoiseParts,
    noise_interval,
    noise_parts,
    with_step,
)


def parts_of(gradients: Float[Tensor, "sample d"], sizes: Sequence[int]) -> NoiseParts:
    """Return the estimates from micro-batches of these sizes, whose gradients are divided by all samples."""
    number = sum(sizes)
    pieces = [piece.sum(0) / number for piece in gradients.split(list(sizes))]
    of_parts = torch.stack([piece.square().sum() for piece in pieces]).sum()
    shares = sum((size / number) ** 2 for size in sizes)
    return noise_parts(torch.stack(pieces).sum(0).square().sum(), of_parts, shares)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (1, 3), (2, 1, 1)])
def test_estimates_have_no_bias(sizes: tuple[int, ...]) -> None:
    """Over all ways to draw four samples, the estimates' means are exactly the squared norm and the variance."""
    population = torch.tensor([[1.0, 0.5], [-2.0, 0.0], [0.3, 4.0]], dtype=torch.float64)
    draws = [parts_of(population[list(drawn)], sizes) for drawn in itertools.product(range(3), repeat=4)]
    mean = population.mean(0)

    found_norm = torch.stack([draw.squared_norm for draw in draws]).mean()
    found_variance = torch.stack([draw.variance for draw in draws]).mean()

    assert float(found_norm) == pytest.approx(float(mean.square().sum()), rel=1e-12)
    assert float(found_variance) == pytest.approx(float((population - mean).square().sum() / 3 / 4), rel=1e-12)


def averaged(rows: Float[Tensor, "step row 2"], *, decay: float = 1.0, weights: Sequence[float] = ()) -> Tensor:
    """Return the moments of steps, each with a squared norm and a variance per row."""
    moments = torch.zeros(rows.shape[1], NUM_MOMENTS, dtype=torch.float64)
    for step, values in enumerate(rows):
        parts = NoiseParts(values[:, 0], values[:, 1])
        weight = weights[step] if weights else 1.0
        moments = with_step(moments, parts, weight=weight, num_samples=1, decay=decay)
    return moments


def test_averages_fade() -> None:
    """Means, standard errors and covariance match plain loops over weighted steps."""
    torch.manual_seed(1)
    rows = torch.rand(12, 1, 2, dtype=torch.float64) + torch.tensor([1.0, 5.0])
    weights = [3.0] * 11 + [0.5]
    w = torch.tensor([0.9 ** (11 - step) * weight for step, weight in enumerate(weights)], dtype=torch.float64)
    a, v = rows[:, 0].unbind(dim=1)
    mean_a, mean_v = (w @ a) / w.sum(), (w @ v) / w.sum()
    number = w.sum() ** 2 / w.square().sum()

    moments = averaged(rows, decay=0.9, weights=weights)
    scale, low, high = (float(one) for one in noise_interval(moments))

    assert scale == pytest.approx(float(mean_v / mean_a), rel=1e-12)
    # By definition, the ends are where the mean of v - r a is the quantile's multiple of its standard error.
    for end in (low, high):
        distance = float(mean_v - end * mean_a)
        squares = w.square() @ ((v - mean_v) - end * (a - mean_a)).square()
        error = float((squares / w.sum() ** 2 * number / (number - 1)).sqrt())
        quantile = abs(distance) / error
        assert quantile == pytest.approx(_student(float(number) - 1), rel=1e-3)


def _student(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t, by integrating its density."""
    x = torch.linspace(0, 60, 600_001, dtype=torch.float64)
    density = (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    mass = density.cumsum(0) / density.sum()
    return float(x[int((mass < 0.95).sum())])


def test_the_interval_covers_at_its_rate() -> None:
    """In 1,000 runs of 60 skewed, correlated steps the 95% interval contains the truth 93% to 97% of the time."""
    torch.manual_seed(2)
    number, steps = 1000, 60
    common = torch.randn(steps, number, dtype=torch.float64)
    squared = torch.randn(steps, number, 4, dtype=torch.float64).square().sum(-1)
    a = 1.0 + 0.8 * common + 0.2 * (squared - 4)
    v = 20.0 + 2.0 * (squared - 4) + common
    _, low, high = noise_interval(averaged(torch.stack([a, v], dim=-1)))

    covered = float(((low <= 20.0) & (high >= 20.0)).double().mean())

    assert 0.93 <= covered <= 0.97


def test_few_steps_have_no_interval() -> None:
    """Before ten steps the interval is from 0 to infinity."""
    rows = torch.tensor([[[1.0, 2.0]], [[1.1, 2.1]], [[0.9, 2.2]]], dtype=torch.float64)
    estimate = NoiseEstimate(moments=averaged(rows))

    assert estimate.interval == (0.0, math.inf)
    assert not estimate.is_known
    assert str(estimate) == "noise scale not known yet"


COST = BatchCost(critical_batch_size=300.0, overhead_seconds=0.02, seconds_per_sample=0.0005)


def test_the_best_batch_takes_the_least_time() -> None:
    """Of all sizes from 1 to 2,000, the one nearest to `best` takes the least time."""
    fastest = min(range(1, 2001), key=lambda size: COST.seconds(size, by=64))

    assert fastest == round(COST.best)
