"""The learning rate follows the batch size by the published rules; schedules are torch's, step for step."""

import io
import itertools
import math
import pickle
import re
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from anybatch.core.learning_rate import (
    BoundedSchedule,
    Constant,
    Cosine,
    LinearDecay,
    ScalingRule,
    Schedule,
    SequentialSchedule,
    WarmUp,
    attach_schedule,
    default_rule,
    join_schedules,
    scale_optimizer,
    scale_rate,
    steps_of_epochs,
    steps_of_samples,
)
from anybatch.errors import BatchSizeError, ParameterError, UserError
from tests.faults import sees

BASE_RATE = 0.1
sizes = st.integers(1, 10_000)
near_sizes = st.integers(1, 500)  # whose ratios keep 0.9 ** kappa a normal number
rules: st.SearchStrategy[ScalingRule] = st.sampled_from(get_args(ScalingRule))
counts = st.integers(0, 50)
fractions = st.floats(0.0, 1.0)


def parameters() -> list[torch.nn.Parameter]:
    """Return the parameters of a model with one weight and one bias."""
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(1))]


def rates_of(make: Callable[[torch.optim.Optimizer], LRScheduler], num_steps: int) -> list[float]:
    """Return the learning rate of each of `num_steps` optimizer steps under the scheduler that `make` returns."""
    optimizer = torch.optim.SGD(parameters(), lr=BASE_RATE)
    return run(optimizer, make(optimizer), num_steps)


def run(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, num_steps: int) -> list[float]:
    """Make `num_steps` optimizer steps, and return the learning rate of each."""
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def schedule_rates(schedule: Schedule, num_steps: int) -> list[float]:
    """Return the learning rates that `schedule` gives under `attach_schedule`."""
    return rates_of(lambda optimizer: attach_schedule(optimizer, schedule), num_steps)


# --- rules -----------------------------------------------------------------------------------------------------------


@sees(
    "square-root scaling is linear",
    "src/anybatch/core/learning_rate.py",
    '"sqrt": math.sqrt(kappa)',
    '"sqrt": kappa',
)
@given(base=sizes, effective=sizes)
def test_rules_are_the_formulas(base: int, effective: int) -> None:
    """Linear multiplies with kappa, sqrt with its root, none with 1; only sqrt changes betas and eps."""
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


@sees(
    "square-root scaling leaves betas alone",
    "src/anybatch/core/learning_rate.py",
    "tuple(beta**kappa if is_sqrt else beta for beta in betas)",
    "tuple(betas)",
    also=["tests/core/test_learning_rate.py::test_sqrt_agrees_to_first_order_with_the_published_form"],
)
@given(base=sizes, effective=sizes, beta=st.floats(0.5, 0.9999))
def test_sqrt_keeps_the_half_life_in_samples(base: int, effective: int, beta: float) -> None:
    """After as many samples, the running average has forgotten as much, and its decay rate stays one."""
    (scaled,) = scale_rate(1.0, base_batch_size=base, effective_batch_size=effective, rule="sqrt", betas=[beta]).betas
    assert 0.0 <= scaled < 1.0
    if scaled > 1e-300:  # below, numbers lose their digits
        assert math.log(scaled) / effective == pytest.approx(math.log(beta) / base, rel=1e-6)


def test_sqrt_agrees_to_first_order_with_the_published_form() -> None:
    """Where kappa (1 - beta) is small, beta ** kappa is 1 - kappa (1 - beta); at 32 x 0.1 only ours is a decay rate."""
    small, large = scale_rate(1.0, base_batch_size=8, effective_batch_size=256, rule="sqrt", betas=(0.99999, 0.9)).betas
    assert 1.0 - small == pytest.approx(32 * (1.0 - 0.99999), rel=1e-3)
    assert 1.0 - 32 * (1.0 - 0.9) < 0.0 < large < 1.0


@given(first=near_sizes, second=near_sizes, third=near_sizes, rule=rules)
def test_scaling_composes(first: int, second: int, third: int, rule: ScalingRule) -> None:
    """Scaling from A to B and then from B to C is scaling from A to C."""
    there = scale_rate(0.3, base_batch_size=first, effective_batch_size=second, rule=rule, betas=(0.9,), eps=1e-8)
    on = scale_rate(
        there.learning_rate,
        base_batch_size=second,
        effective_batch_size=third,
        rule=rule,
        betas=there.betas,
        eps=there.eps,
    )
    direct = scale_rate(0.3, base_batch_size=first, effective_batch_size=third, rule=rule, betas=(0.9,), eps=1e-8)
    assert on.learning_rate == pytest.approx(direct.learning_rate, rel=1e-12)
    assert on.betas == pytest.approx(direct.betas, rel=1e-9)
    assert on.eps == pytest.approx(direct.eps, rel=1e-12)


def test_the_banner_names_what_changed() -> None:
    """The description is one line that holds the rule, both sizes, and betas and eps only if they changed."""
    linear = scale_rate(0.0001, base_batch_size=8, effective_batch_size=256, rule="linear", betas=(0.9,), eps=1e-8)
    assert str(linear) == "lr 0.0032 = 0.0001 x 32 (linear, 256 / 8 samples)"
    sqrt = scale_rate(0.001, base_batch_size=64, effective_batch_size=256, rule="sqrt", betas=(0.9, 0.999), eps=1e-8)
    assert str(sqrt) == (
        "lr 0.002 = 0.001 x 2 (sqrt, 256 / 64 samples), betas 0.9, 0.999 -> 0.6561, 0.996006, eps 1e-08 -> 5e-09"
    )


@pytest.mark.parametrize(("base", "effective"), [(0, 256), (8, 0), (-1, 8), (8, 2.5)])
def test_batch_sizes_below_one_are_refused(base: int, effective: int) -> None:
    """A batch size that is no whole number from 1 on is named in the error."""
    with pytest.raises(BatchSizeError, match=r"(base|effective)_batch_size=(0|-1|2.5) must be a whole number"):
        scale_rate(0.1, base_batch_size=base, effective_batch_size=effective, rule="linear")


def test_unknown_rules_are_refused_with_the_known_ones() -> None:
    """A rule that does not exist is answered with the list of those that do."""
    with pytest.raises(UserError, match=re.escape("rule='cubic' is not a scaling rule; use one of 'linear', 'sqrt', ")):
        scale_rate(0.1, base_batch_size=8, effective_batch_size=8, rule="cubic")  # type: ignore[arg-type]


@pytest.mark.parametrize("learning_rate", [-0.1, math.nan, math.inf])
def test_bad_learning_rates_are_refused(learning_rate: float) -> None:
    """A negative or non-finite learning rate is refused before it reaches an optimizer."""
    with pytest.raises(UserError, match="learning_rate"):
        scale_rate(learning_rate, base_batch_size=8, effective_batch_size=8, rule="none")


# --- rules on an optimizer -------------------------------------------------------------------------------------------


@sees(
    "Adam is scaled linearly by default",
    "src/anybatch/core/learning_rate.py",
    """
        return "sqrt"
""",
    """
        return "linear"
""",
)
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
    """SGD scales linearly, Adam and its kin with the square root."""
    assert default_rule(make(parameters(), lr=0.1)) == rule


@pytest.mark.parametrize("make", [torch.optim.Adadelta, torch.optim.Muon, torch.optim.ASGD, torch.optim.Adafactor])
def test_optimizers_without_a_known_rule_are_refused(make: Callable[..., torch.optim.Optimizer]) -> None:
    """No rule is guessed: the error names the type and the rules; naming one scales the rate and nothing else."""
    optimizer = make([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1)
    with pytest.raises(UserError, match=rf"{make.__name__}, which is neither.*'linear', 'sqrt', 'none'"):
        scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    before = {**optimizer.param_groups[0], "lr": 0.2}
    scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32, rule="sqrt")
    assert optimizer.param_groups[0] == before


@sees(
    "the first group's scaled rate goes to all groups",
    "src/anybatch/core/learning_rate.py",
    """
        _update_group(group, key, rate)
""",
    """
        _update_group(group, key, scaled[0])
""",
)
def test_every_group_keeps_its_own_rate_and_weight_decay() -> None:
    """Each group's own rate, betas and eps are scaled; weight decay and all else stay as they were."""
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


def test_linear_leaves_betas_alone() -> None:
    """An explicit linear rule on Adam changes the learning rate only."""
    optimizer = torch.optim.Adam(parameters(), lr=0.01)
    before = {**optimizer.param_groups[0], "lr": 0.04}
    scale_optimizer(optimizer, base_batch_size=64, effective_batch_size=256, rule="linear")
    assert optimizer.param_groups[0] == before
    assert optimizer.param_groups[0]["betas"] is before["betas"]


def test_betas_alone_do_not_make_an_optimizer_adam_like() -> None:
    """An optimizer of signs has betas but no eps: no rule is guessed for it, and a named one leaves its betas alone."""
    optimizer = torch.optim.Optimizer(parameters(), {"lr": 0.01, "betas": (0.9, 0.99)})
    with pytest.raises(UserError, match="no scaling rule is known"):
        default_rule(optimizer)
    (rate,) = scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32, rule="sqrt")
    assert (rate.betas, rate.eps) == ((), None)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)


def test_rmsprop_keeps_its_alpha_a_number() -> None:
    """RMSprop's one decay rate is called alpha and stays one number."""
    optimizer = torch.optim.RMSprop(parameters(), lr=0.01, alpha=0.9, momentum=0.5)
    (rate,) = scale_optimizer(optimizer, base_batch_size=64, effective_batch_size=128)
    assert optimizer.param_groups[0]["alpha"] == pytest.approx(0.81)
    assert rate.betas == (optimizer.param_groups[0]["alpha"],)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_tensor_rate_shared_by_groups_is_scaled_once_each() -> None:
    """Groups that share one rate tensor each get their own scaled one, still a tensor of that type."""
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
    """A scheduler keeps the rates it was made with, so scaling afterwards would be undone: it is refused."""
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    attach_schedule(optimizer, Constant())
    with pytest.raises(ParameterError, match="Scale first"):
        scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_nothing_changes_when_scaling_fails() -> None:
    """An error leaves every group as it was, also the groups before the one at fault."""
    weight, bias = parameters()
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.1}])
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(UserError, match="learning_rate=-1"):
        scale_optimizer(optimizer, base_batch_size=8, effective_batch_size=32)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_linear_scaling_keeps_sgd_on_its_course() -> None:
    """One step on 4 equal samples at the scaled rate is, to first order, 4 steps of one sample at the base rate."""

    def train(learning_rate: float, num_steps: int) -> float:
        weight = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=learning_rate)
        for _ in range(num_steps):
            optimizer.zero_grad()
            torch.autograd.backward(weight**2 / 2)
            optimizer.step()
        return 1.0 - weight.item()

    scaled = scale_rate(1e-4, base_batch_size=1, effective_batch_size=4, rule="linear")
    assert train(scaled.learning_rate, 1) == pytest.approx(train(1e-4, 4), rel=1e-3)


# --- schedules -------------------------------------------------------------------------------------------------------


@sees(
    "a warm-up is one step ahead",
    "src/anybatch/core/learning_rate.py",
    "else step / num_steps",
    "else (step + 1) / num_steps",
    also=[
        "tests/core/test_learning_rate.py::test_linear_decay_is_torchs_linear_lr",
        "tests/core/test_learning_rate.py::test_cosine_is_torchs_cosine_annealing",
    ],
)
@given(num_steps=st.integers(1, 30), start=st.floats(0.01, 1.0))
def test_warm_up_is_torchs_linear_lr(num_steps: int, start: float) -> None:
    """WarmUp gives the learning rates of torch's LinearLR, during and after the warm-up."""
    ours = schedule_rates(WarmUp(num_steps=num_steps, start_factor=start), num_steps + 3)
    torchs = rates_of(lambda optimizer: LinearLR(optimizer, start, 1.0, num_steps), num_steps + 3)
    assert ours == pytest.approx(torchs, rel=1e-12)


@given(num_steps=st.integers(1, 30), floor=fractions)
def test_linear_decay_is_torchs_linear_lr(num_steps: int, floor: float) -> None:
    """LinearDecay gives the learning rates of torch's LinearLR from 1 down, and stays at the floor."""
    ours = schedule_rates(LinearDecay(num_steps=num_steps, floor=floor), num_steps + 3)
    torchs = rates_of(lambda optimizer: LinearLR(optimizer, 1.0, floor, num_steps), num_steps + 3)
    assert ours == pytest.approx(torchs, rel=1e-9, abs=1e-12)


@given(num_steps=st.integers(1, 30), floor=fractions)
def test_cosine_is_torchs_cosine_annealing(num_steps: int, floor: float) -> None:
    """Cosine gives the learning rates of torch's CosineAnnealingLR down to the floor, where ours stays."""
    ours = schedule_rates(Cosine(num_steps=num_steps, floor=floor), num_steps + 3)
    torchs = rates_of(lambda optimizer: CosineAnnealingLR(optimizer, num_steps, floor * BASE_RATE), num_steps + 1)
    assert ours[: num_steps + 1] == pytest.approx(torchs, rel=1e-9, abs=1e-12)
    assert ours[num_steps:] == pytest.approx([floor * BASE_RATE] * 3, abs=1e-12)


@sees(
    "a joined schedule counts from the start of the run",
    "src/anybatch/core/learning_rate.py",
    "self.parts[number](step - starts[number])",
    "self.parts[number](step)",
    also=["tests/core/test_learning_rate.py::test_joining_runs_each_part_from_its_own_start"],
)
@given(warm_up=st.integers(1, 10), decay=st.integers(1, 20), start=st.floats(0.01, 1.0), floor=fractions)
def test_joining_is_torchs_sequential_lr(warm_up: int, decay: int, start: float, floor: float) -> None:
    """A warm-up and then a cosine gives the learning rates of torch's SequentialLR."""

    def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
        parts = [LinearLR(optimizer, start, 1.0, warm_up), CosineAnnealingLR(optimizer, decay, floor * BASE_RATE)]
        return SequentialLR(optimizer, parts, [warm_up])

    num_steps = warm_up + decay + 1
    schedule = join_schedules(WarmUp(num_steps=warm_up, start_factor=start), Cosine(num_steps=decay, floor=floor))
    torchs = rates_of(sequential, num_steps)
    assert schedule_rates(schedule, num_steps) == pytest.approx(torchs, rel=1e-9, abs=1e-12)


@given(num_steps=counts, start=fractions)
def test_warm_up_rises_from_its_start_to_one(num_steps: int, start: float) -> None:
    """A warm-up begins at its start factor, never falls, and is exactly 1 from its last step on."""
    schedule = WarmUp(num_steps=num_steps, start_factor=start)
    factors = [schedule(step) for step in range(num_steps + 3)]
    assert factors[0] == (start if num_steps else 1.0)
    assert all(before <= after for before, after in itertools.pairwise(factors))
    assert factors[num_steps:] == [1.0] * 3


@given(num_steps=counts, floor=fractions, make=st.sampled_from([Cosine, LinearDecay]))
def test_decays_fall_from_one_to_the_floor(num_steps: int, floor: float, make: type[Cosine | LinearDecay]) -> None:
    """Both decays begin at 1, never rise, and stay at their floor."""
    schedule = make(num_steps=num_steps, floor=floor)
    factors = [schedule(step) for step in range(num_steps + 3)]
    assert factors[0] == pytest.approx(1.0 if num_steps else floor, abs=1e-15)
    assert all(before >= after for before, after in itertools.pairwise(factors))
    assert factors[num_steps:] == pytest.approx([floor] * 3, abs=1e-15)


parts = st.one_of(
    st.builds(WarmUp, num_steps=counts, start_factor=fractions),
    st.builds(Constant, num_steps=counts, factor=fractions),
    st.builds(Cosine, num_steps=counts, floor=fractions),
    st.builds(LinearDecay, num_steps=counts, floor=fractions),
)


@given(schedules=st.lists(parts, min_size=1, max_size=4))
def test_joining_runs_each_part_from_its_own_start(schedules: list[BoundedSchedule]) -> None:
    """Joined schedules give, step by step, what their parts give one after another; then the last part's end."""
    joined = join_schedules(*schedules)
    expected = [part(step) for part in schedules for step in range(part.num_steps or 0)]
    expected += [schedules[-1](schedules[-1].num_steps or 0)]
    assert joined.num_steps == len(expected) - 1
    assert [joined(step) for step in range(len(expected))] == expected


@given(first=parts, second=parts, third=parts)
def test_joining_is_associative(first: BoundedSchedule, second: BoundedSchedule, third: BoundedSchedule) -> None:
    """How joins are nested does not matter: the value is the same."""
    assert (
        join_schedules(join_schedules(first, second), third)
        == join_schedules(first, join_schedules(second, third))
        == join_schedules(first, second, third)
    )


@given(warm_up=st.integers(1, 50), hold=counts, decay=st.integers(1, 50))
def test_warm_up_hold_decay_is_continuous(warm_up: int, hold: int, decay: int) -> None:
    """Warm-up, hold and decay join without a jump: no step moves further than the steepest part."""
    schedule = join_schedules(
        WarmUp(num_steps=warm_up, start_factor=0.0), Constant(num_steps=hold), LinearDecay(num_steps=decay)
    )
    factors = [schedule(step) for step in range(warm_up + hold + decay + 1)]
    steepest = max(1 / warm_up, 1 / decay)
    assert all(abs(after - before) <= steepest + 1e-12 for before, after in itertools.pairwise(factors))


def test_nothing_follows_a_schedule_without_end() -> None:
    """A schedule without end can only stand last; joining one before another says which and what to do."""
    with pytest.raises(UserError, match=r"Constant\(factor=1.0, num_steps=None\).*Give it num_steps, or put it last"):
        join_schedules(Constant(), Cosine(num_steps=3))
    joined = join_schedules(Constant(num_steps=1), Constant())
    assert joined == SequentialSchedule((Constant(num_steps=1), Constant()))
    assert joined.num_steps is None


@pytest.mark.parametrize(
    "schedule",
    [
        WarmUp(num_steps=2, start_factor=0.5),
        Constant(),
        Cosine(num_steps=2),
        join_schedules(Constant(num_steps=1), Constant()),
    ],
)
def test_negative_steps_are_refused(schedule: Schedule) -> None:
    """There is no step before step 0."""
    with pytest.raises(UserError, match="step=-1 must be a whole number of at least 0"):
        schedule(-1)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: WarmUp(num_steps=-1, start_factor=0.0), "num_steps=-1"),
        (lambda: WarmUp(num_steps=2.5, start_factor=0.0), "num_steps=2.5"),  # type: ignore[arg-type]
        (lambda: WarmUp(num_steps=1, start_factor=1.5), "start_factor=1.5"),
        (lambda: Cosine(num_steps=1, floor=-0.1), "floor=-0.1"),
        (lambda: LinearDecay(num_steps=1, floor=math.nan), "floor=nan"),
        (lambda: Constant(factor=math.inf), "factor=inf"),
        (lambda: Constant(num_steps=-3), "num_steps=-3"),
    ],
)
def test_bad_schedules_are_refused_when_made(make: Callable[[], Schedule], name: str) -> None:
    """A schedule with a bad argument cannot be made, so it cannot fail in the middle of a run."""
    with pytest.raises(UserError, match=f"^{re.escape(name)} must be"):
        make()


# --- steps from samples and epochs -----------------------------------------------------------------------------------


@sees(
    "steps of samples are rounded down",
    "src/anybatch/core/learning_rate.py",
    "return ceil_div(num_samples, effective_batch_size)",
    "return num_samples // effective_batch_size",
    also=["tests/core/test_learning_rate.py::test_whole_epochs_are_the_batches_they_have"],
)
@given(num_samples=st.integers(0, 10**9), effective=sizes)
def test_steps_of_samples_are_the_fewest_that_see_them(num_samples: int, effective: int) -> None:
    """One step fewer would not have seen the samples."""
    steps = steps_of_samples(num_samples, effective_batch_size=effective)
    assert steps * effective >= num_samples
    assert (steps - 1) * effective < num_samples


@given(num_epochs=st.integers(0, 100), samples=st.integers(0, 10_000), effective=sizes)
def test_whole_epochs_are_the_batches_they_have(num_epochs: int, samples: int, effective: int) -> None:
    """Every batch of an epoch is a step, also its smaller last one."""
    per_epoch = len(range(0, samples, effective))
    steps = steps_of_epochs(num_epochs, samples_per_epoch=samples, effective_batch_size=effective)
    assert steps == num_epochs * per_epoch


@given(tenths=st.integers(0, 1000), steps_per_epoch=st.integers(1, 1000))
def test_parts_of_epochs_are_rounded_up_once(tenths: int, steps_per_epoch: int) -> None:
    """A part of an epoch is rounded up in exact arithmetic: 0.1 epochs of 30 steps are 3 steps, not 4."""
    exact = -(-tenths * steps_per_epoch // 10)
    assert steps_of_epochs(tenths / 10, samples_per_epoch=steps_per_epoch * 8, effective_batch_size=8) == exact


def test_bad_warm_up_lengths_are_refused() -> None:
    """Negative lengths and batch sizes below 1 are refused by name."""
    with pytest.raises(UserError, match="num_samples=-1"):
        steps_of_samples(-1, effective_batch_size=8)
    with pytest.raises(BatchSizeError, match="effective_batch_size=0"):
        steps_of_samples(1, effective_batch_size=0)
    with pytest.raises(UserError, match="num_epochs=-1"):
        steps_of_epochs(-1, samples_per_epoch=8, effective_batch_size=8)


# --- saving ----------------------------------------------------------------------------------------------------------


def test_schedules_survive_pickling() -> None:
    """A schedule is a value: its pickled copy is equal to it and gives the same factors."""
    schedule = join_schedules(
        WarmUp(num_steps=3, start_factor=0.1), Constant(num_steps=2), Cosine(num_steps=4, floor=0.1)
    )
    copy = pickle.loads(pickle.dumps(schedule))  # noqa: S301 (made here)
    assert copy == schedule
    assert [copy(step) for step in range(12)] == [schedule(step) for step in range(12)]


def test_a_resumed_schedule_goes_on_where_it_was() -> None:
    """The scheduler's state loads as plain data, and the resumed run has the rates of the uninterrupted one."""
    schedule = join_schedules(WarmUp(num_steps=3, start_factor=0.1), Cosine(num_steps=6))
    uninterrupted = schedule_rates(schedule, 10)

    def make() -> tuple[torch.optim.Optimizer, LRScheduler]:
        optimizer = torch.optim.SGD(parameters(), lr=BASE_RATE)
        return optimizer, attach_schedule(optimizer, schedule)

    optimizer, scheduler = make()
    before = run(optimizer, scheduler, 4)
    saved = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    optimizer, scheduler = make()
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    assert before + run(optimizer, scheduler, 6) == uninterrupted


def test_loading_a_schedulers_state_does_not_change_the_schedule() -> None:
    """The schedule is the one in the code: loading the state of another one only sets the step."""
    optimizer = torch.optim.SGD(parameters(), lr=BASE_RATE)
    old = attach_schedule(optimizer, LinearDecay(num_steps=2))
    schedule = LinearDecay(num_steps=10)
    new = attach_schedule(torch.optim.SGD(parameters(), lr=BASE_RATE), schedule)
    new.load_state_dict(old.state_dict())
    assert schedule == LinearDecay(num_steps=10)
    new.optimizer.step()
    new.step()
    assert new.get_last_lr() == pytest.approx([0.9 * BASE_RATE])
