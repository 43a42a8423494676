"""The learning rate follows the batch size by the published rules."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.learning_rate import (
    adam_gain,
    default_rule,
    noise_gain,
    scale_optimizer,
    scale_rate,
    scaled_weight_decay,
)
from anybatch.core.run_config import ScalingRule
from anybatch.core.schedules import attach_schedule
from anybatch.errors import ParameterError, UserError
from tests.raising import raises

sizes = st.integers(1, 10_000)
rules: st.SearchStrategy[ScalingRule] = st.sampled_from(get_args(ScalingRule))


def parameters() -> list[torch.nn.Parameter]:
    """Return the parameters of a model with one weight and one bias."""
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(1))]


# --- rules -----------------------------------------------------------------------------------------------------------


@given(base=sizes, effective=sizes)
def test_rules_are_the_formulas(base: int, effective: int) -> None:
    """Linear multiplies by kappa, sqrt by its root, none by 1; only sqrt changes betas and eps."""
    kappa = effective / base
    factors: dict[ScalingRule, float] = {"linear": kappa, "sqrt": kappa**0.5, "none": 1.0}
    for rule, factor in factors.items():
        rate = scale_rate(
            0.5, base_batch_size=base, effective_batch_size=effective, rule=rule, betas=(0.9, 0.99), eps=1e-8
        )
        assert rate.factor == pytest.approx(factor, rel=1e-15)
        assert rate.learning_rate == pytest.approx(0.5 * factor, rel=1e-15)
        if rule == "sqrt":
            assert rate.betas == pytest.approx((0.9**kappa, 0.99**kappa), rel=1e-15)
            assert rate.eps == pytest.approx(1e-8 / kappa**0.5, rel=1e-15)
        else:
            assert (rate.betas, rate.eps) == ((0.9, 0.99), 1e-8)


@pytest.mark.parametrize("learning_rate", [-0.1, math.nan, math.inf])
def test_bad_learning_rates_are_refused(learning_rate: float) -> None:
    """A negative or non-finite learning rate is refused before it reaches an optimizer."""
    with raises(UserError, "negative"):
        scale_rate(learning_rate, base_batch_size=8, effective_batch_size=8, rule="none")


# --- rules on an optimizer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (torch.optim.SGD, "linear"),
        (torch.optim.Adam, "sqrt"),
        (torch.optim.AdamW, "sqrt"),
        (torch.optim.NAdam, "sqrt"),
        (torch.optim.RMSprop, "sqrt"),
    ],
)
def test_default_rules(make: Callable[..., torch.optim.Optimizer], rule: str) -> None:
    """SGD scales linearly; Adam and its variants scale with the square root."""
    assert default_rule(make(parameters(), lr=0.1)) == rule


@pytest.mark.parametrize("make", [torch.optim.Adadelta, torch.optim.Muon, torch.optim.ASGD, torch.optim.Adafactor])
def test_optimizers_without_a_known_rule_are_refused(make: Callable[..., torch.optim.Optimizer]) -> None:
    """No rule is guessed: the error names the type and the rules; naming one scales the rate and nothing else."""
    optimizer = make([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with raises(UserError, "no_rule_known"):
        scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    before = {**optimizer.param_groups[0], "lr": 0.2}
    scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32, rule="sqrt")
    assert optimizer.param_groups[0] == before


def test_every_group_keeps_its_own_rate_and_weight_decay() -> None:
    """Each group's rate, betas and eps are scaled; weight decay and everything else are unchanged."""
    weight, bias = parameters()
    groups = [
        {"params": [weight], "lr": 0.01, "weight_decay": 0.1},
        {"params": [bias], "lr": 0.03, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-6},
    ]
    optimizer = torch.optim.AdamW(groups)
    before = [dict(group) for group in optimizer.param_groups]
    rates = scale_optimizer(optimizer, base_batch_size=64, effective_batch_size=256)
    assert [rate.learning_rate for rate in rates] == [0.02, 0.06]
    for old, new, rate in zip(before, optimizer.param_groups, rates, strict=True):
        assert (new["lr"], new["betas"], new["eps"]) == (rate.learning_rate, rate.betas, rate.eps)
        assert rate.betas == pytest.approx(tuple(beta**4 for beta in old["betas"]))
        assert rate.eps == pytest.approx(old["eps"] / 2)
        assert {**new, "lr": 0, "betas": 0, "eps": 0} == {**old, "lr": 0, "betas": 0, "eps": 0}


def test_rmsprop_keeps_its_alpha_a_number() -> None:
    """RMSprop's decay rate alpha stays a single number."""
    optimizer = torch.optim.RMSprop(parameters(), lr=0.01, alpha=0.9, momentum=0.5)
    (rate,) = scale_optimizer(optimizer, base_batch_size=64, effective_batch_size=128)
    assert optimizer.param_groups[0]["alpha"] == pytest.approx(0.81)
    assert rate.betas == (optimizer.param_groups[0]["alpha"],)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_tensor_rate_shared_by_groups_is_scaled_once_each() -> None:
    """Groups that share a rate tensor get separate scaled tensors of the same dtype."""
    shared = torch.tensor(0.01, dtype=torch.float64)
    weight, bias = parameters()
    groups = [{"params": [weight], "lr": shared}, {"params": [bias], "lr": shared}]
    optimizer = torch.optim.Adam(groups, foreach=False, capturable=False)
    scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"].dtype == torch.float64
        assert float(group["lr"]) == 0.02
    assert float(shared) == 0.01


def test_scaling_under_a_scheduler_is_refused() -> None:
    """Scaling after a scheduler was created raises, as the scheduler would undo it."""
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    attach_schedule(optimizer, lambda _: 1.0)
    with raises(ParameterError, "has_scheduler"):
        scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    assert optimizer.param_groups[0]["lr"] == 0.1


# --- memory: running averages that keep their length in samples -------------------------------------------------------


def test_momentum_in_samples_follows_small_steps() -> None:
    """SGD with momentum ** kappa at the corrected rate follows kappa small steps; with the same momentum it does not.

    On a quadratic, in float64, over many half-lives of the momentum; the plain computation is torch's own SGD.
    """

    def train(rate: float, momentum: float, num_steps: int) -> float:
        weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=rate, momentum=momentum)
        for _ in range(num_steps):
            optimizer.zero_grad()
            torch.autograd.backward(weight**2 / 2)
            optimizer.step()
        return weight.item()

    plain = train(2e-5, 0.99, 320)
    kept = scale_rate(2e-5, base_batch_size=1, effective_batch_size=8, rule="linear", momentum=0.99, memory="samples")
    assert kept.momentum == pytest.approx(0.99**8)
    assert train(kept.learning_rate, kept.momentum, 40) == pytest.approx(plain, rel=0.01)
    assert abs(train(1.6e-4, 0.99, 40) / plain - 1.0) > 0.4


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.SGD(parameters(), lr=0.1, momentum=0.9),
        lambda: torch.optim.RMSprop(parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["SGD", "RMSprop"],
)
def test_momentum_is_scaled_on_request(make: Callable[[], torch.optim.Optimizer]) -> None:
    """memory="samples" scales momentum in the group and reports it; by default momentum is kept, for every rule."""
    optimizer, plain = make(), make()
    (rate,) = scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=16, rule="linear", memory="samples")
    scale_optimizer(plain, base_batch_size=8, effective_batch_size=16, rule="sqrt")
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.81)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.19 / 0.1)
    assert "momentum 0.9 -> 0.81" in str(rate)
    assert plain.param_groups[0]["momentum"] == 0.9


# --- the gain of AdaScale --------------------------------------------------------------------------------------------


@given(base=sizes, kappa=st.integers(1, 1000), noise=st.floats(0.0, 1e9))
def test_the_gain_is_adascales(base: int, kappa: int, noise: float) -> None:
    """The gain matches AdaScale's formula in sigma^2 and mu^2, and is between 1 (no noise) and kappa (only noise)."""
    gain = noise_gain(noise, base_batch_size=base, effective_batch_size=kappa * base)
    variance, signal = noise / base, 1.0  # of the gradient of one base batch
    assert gain == pytest.approx((variance + signal) / (variance / kappa + signal), rel=1e-12)
    assert 1.0 <= gain <= kappa * (1.0 + 1e-12)
    assert noise_gain(1e18, base_batch_size=base, effective_batch_size=kappa * base) == pytest.approx(kappa)


@given(noise=st.floats(1.0, 1e6), base=st.integers(1, 10_000))
def test_adam_gain(noise: float, base: int) -> None:
    """Adam's gain is sqrt(kappa) far below the noise scale, largest at it, and falls as 1 / sqrt(kappa) far above."""

    def gain(size: int) -> float:
        return adam_gain(noise, base_batch_size=base, effective_batch_size=size)

    def rate(size: float) -> float:  # Li et al. 2024, equation 15, up to a factor
        return 1.0 / (math.sqrt(noise / size) + math.sqrt(size / noise))

    for size in (base, 2 * base, 50 * base):
        assert gain(size) == pytest.approx(rate(size) / rate(base))
    near = max(1, round(noise))
    assert gain(near) >= gain(max(1, near // 3)) - 1e-9
    assert gain(near) >= gain(3 * near) - 1e-9
    assert adam_gain(1e18, base_batch_size=base, effective_batch_size=4 * base) == pytest.approx(2.0)


@pytest.mark.parametrize("rule", ["sqrt", "none"])
def test_weight_decay_keeps_its_average_over_samples(rule: ScalingRule) -> None:
    """AdamW decays a weight by the same factor over the same samples, at the scaled rate, decay and batch size."""
    rate = scale_rate(1e-3, base_batch_size=16, effective_batch_size=256, rule=rule, betas=(0.9, 0.99))
    decayed = []
    for size, learning_rate, decay in (
        (16, 1e-3, 0.1),
        (256, rate.learning_rate, scaled_weight_decay(0.1, rate)),
    ):
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=learning_rate, weight_decay=decay)
        for _ in range(25_600 // size):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
        decayed.append(float(weight.detach()))
    assert decayed[0] == pytest.approx(decayed[1], rel=1e-3)
    assert "weight decay" in str(rate)
    assert "weight decay" not in str(scale_rate(1e-3, base_batch_size=8, effective_batch_size=64, rule="linear"))
