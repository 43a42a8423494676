"""Spikes are detected when a loss jumps or diverges, and only then."""

import math
import random
from collections.abc import Callable

import pytest

from anybatch.core.spikes import SpikeRule, spikes_of

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
