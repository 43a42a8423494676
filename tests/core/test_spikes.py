"""Spikes are detected when a loss jumps or diverges, and only then."""

import math
import random
from collections.abc import Callable, Iterator

import pytest

from anybatch.core.spikes import SpikeDetector, SpikeRule, spikes_of

Values = list[tuple[int, float, float | None]]


def healthy(num_steps: int, *, seed: int = 0, scatter: float = 0.3) -> Values:
    """Return losses that fall by a power of the step, and norms about 1, both with noise."""
    draw = random.Random(seed)
    return [
        (step, 2.3 * (1 + step / 50) ** -0.7 * math.exp(draw.gauss(0, scatter)), math.exp(draw.gauss(0, scatter)))
        for step in range(num_steps)
    ]


def from_step(values: Values, first: int, change: Callable[[int, float, float], tuple[float, float]]) -> Values:
    """Return values changed from a step on by a function of (steps since then, loss, norm)."""
    return [
        (step, *(change(step - first, loss, norm or 0.0) if step >= first else (loss, norm)))
        for step, loss, norm in values
    ]


def test_noise_is_not_a_spike() -> None:
    """No spike in 4,000 steps of a loss that falls with noise, in runs of any length and scatter."""
    for seed, scatter in ((0, 0.03), (1, 0.3), (2, 1.0)):
        assert spikes_of(healthy(1300, seed=seed, scatter=scatter), SpikeRule()) == []


def test_a_plateau_is_not_a_spike() -> None:
    """The lowest of many noisy levels does not make the level of a loss sink that has stopped falling."""
    for seed in (0, 1):
        draw = random.Random(seed)
        plateau: Values = [(step, math.exp(draw.gauss(0, 0.3)), None) for step in range(6000)]
        assert spikes_of(plateau, SpikeRule()) == []


@pytest.mark.parametrize(
    ("change", "quantity", "forms", "within"),
    [
        (lambda age, loss, norm: (loss * 40 if not age else loss, norm), "loss", ("jump",), 1),
        (lambda age, loss, norm: (loss, norm * 1e3 if not age else norm), "gradient norm", ("jump",), 1),
        (lambda age, loss, norm: (loss * 1.1 ** (age + 1), norm), "loss", ("rise",), 20),
        (lambda age, loss, norm: (loss * 1.01 ** (age + 1), norm), "loss", ("rise",), 120),
        (lambda age, loss, norm: (math.nan if age == 3 else loss, norm), "loss", ("not finite",), 4),
        (lambda age, loss, norm: (loss, math.inf if age == 3 else norm), "gradient norm", ("not finite",), 4),
    ],
    ids=["loss-jumps", "norm-jumps", "loss-rises", "loss-creeps", "loss-nan", "norm-inf"],
)
def test_a_diverging_run_is_a_spike(
    change: Callable[[int, float, float], tuple[float, float]], quantity: str, forms: tuple[str, ...], within: int
) -> None:
    """Jumps are detected immediately, and rises of 1% a step or more within some steps, with their kind."""
    (spike, *_) = spikes_of(from_step(healthy(500), 300, change), SpikeRule())
    assert (spike.quantity, spike.form in forms) == (quantity, True)
    assert 300 <= spike.step < 300 + within
    assert spike.level < spike.value or spike.form == "not finite"
    assert f"step {spike.step}" in str(spike)


def test_the_unit_of_a_loss_does_not_matter() -> None:
    """Scaled losses give the same spikes in the same steps."""
    values = from_step(healthy(400), 200, lambda age, loss, norm: (loss * 1.1**age, norm))
    other = [(step, 1e-3 * loss, None if norm is None else 1e5 * norm) for step, loss, norm in values]
    assert [spike.step for spike in spikes_of(values, SpikeRule())] == [
        spike.step for spike in spikes_of(other, SpikeRule())
    ]


def early_divergences() -> Iterator[tuple[int, list[float]]]:
    """Yield the first step and the losses of twenty runs of 30 to 50 steps that diverge before step 25."""
    for number in range(20):
        draw, first = random.Random(number), (1, 2, 3, 5, 8, 12, 16, 20)[number % 8]
        growth, ceiling = math.exp(draw.uniform(math.log(1.2), math.log(200.0))), 10 ** draw.uniform(1.0, 5.0)
        losses: list[float] = []
        for step in range(50):
            healthy = 2.3 * (1 + step / 20) ** -0.7
            grown = healthy if step < first else min(2.3 * ceiling, losses[first - 1] * growth ** (step - first + 1))
            losses.append(max(healthy, grown) * math.exp(draw.gauss(0.0, 0.15)))
        yield first, losses


def healthy_warm_ups() -> Iterator[list[float]]:
    """Yield the first 60 losses of twenty runs: noise of all sizes, steep and slow falls, and overshoots."""
    for number in range(20):
        draw = random.Random(100 + number)
        scatter, steepness = draw.choice((0.02, 0.1, 0.3, 0.6, 1.0)), draw.choice((0.5, 2.0, 5.0, 50.0))
        overshoot = draw.choice((0.0, 0.0, 0.8))
        yield [
            (sum(draw.gauss(0.0, 0.5) ** 2 for _ in range(4)) if number >= 16 else 1.0)
            * (4.0 * (1.0 + step / steepness) ** -0.7 + overshoot * 4.0 * math.exp(-((step - 3) ** 2) / 4))
            * math.exp(draw.gauss(0.0, scatter))
            for step in range(60)
        ]


@pytest.mark.parametrize(("first", "losses"), list(early_divergences()))
def test_early_divergence(first: int, losses: list[float]) -> None:
    """A loss that diverges before the level is known is a spike, within 15 steps and 30 in total, in any unit."""
    for unit in (1e-3, 1.0, 1e3):
        spikes = spikes_of(((step, unit * loss, None) for step, loss in enumerate(losses)), SpikeRule())
        assert spikes
        assert first <= spikes[0].step <= min(30, first + 15)
        assert spikes[0].level < spikes[0].value


@pytest.mark.parametrize("losses", list(healthy_warm_ups()))
def test_healthy_warm_up(losses: list[float]) -> None:
    """The first steps of a healthy run do not count as a spike."""
    assert spikes_of(((step, loss, 1.0) for step, loss in enumerate(losses)), SpikeRule()) == []


def test_divergence_in_the_second_step() -> None:
    """A run that reaches a loss of 73,383 in step 8 is found in step 2, and stays found."""
    losses = [4.65, 1725.0, 917.0, 1300.0, 4000.0, 9000.0, 30000.0, 52000.0, 73383.0, *[60000.0] * 60]
    detector = SpikeDetector(SpikeRule())
    found = [step for step, loss in enumerate(losses) if detector.add(step, loss, None)]
    assert found[0] == 2
    assert found[-1] == len(losses) - 1
    assert not detector.is_calm
