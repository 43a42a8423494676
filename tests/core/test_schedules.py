"""Learning-rate schedules match torch's, step by step."""

import io
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from anybatch.core.schedules import (
    BatchRamp,
    Cosine,
    Schedule,
    Stage,
    WarmUp,
    attach_schedule,
    join_schedules,
    seesaw,
    steps_of_epochs,
    steps_of_samples,
)
from anybatch.errors import BatchSizeError, UserError
from anybatch.schedules import ramp_from_noise
from tests.raising import raises

BASE_RATE = 0.1
sizes = st.integers(1, 10_000)
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


# --- schedules -------------------------------------------------------------------------------------------------------


@given(num_steps=st.integers(1, 30), start=st.floats(0.01, 1.0))
def test_warm_up_is_torchs_linear_lr(num_steps: int, start: float) -> None:
    """WarmUp gives the learning rates of torch's LinearLR, during and after the warm-up."""
    ours = schedule_rates(WarmUp(num_steps=num_steps, start_factor=start), num_steps + 3)
    torchs = rates_of(lambda optimizer: LinearLR(optimizer, start, 1.0, num_steps), num_steps + 3)
    assert ours == pytest.approx(torchs, rel=1e-12)


@given(num_steps=st.integers(1, 30), floor=fractions)
def test_cosine_is_torchs_cosine_annealing(num_steps: int, floor: float) -> None:
    """Cosine gives the learning rates of torch's CosineAnnealingLR down to the floor, where ours stays."""
    ours = schedule_rates(Cosine(num_steps=num_steps, floor=floor), num_steps + 3)
    torchs = rates_of(lambda optimizer: CosineAnnealingLR(optimizer, num_steps, floor * BASE_RATE), num_steps + 1)
    assert ours[: num_steps + 1] == pytest.approx(torchs, rel=1e-9, abs=1e-12)
    assert ours[num_steps:] == pytest.approx([floor * BASE_RATE] * 3, abs=1e-12)


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


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: WarmUp(num_steps=-1, start_factor=0.0), "not_a_whole_number"),
        (lambda: WarmUp(num_steps=2.5, start_factor=0.0), "not_a_whole_number"),  # type: ignore[arg-type]
        (lambda: WarmUp(num_steps=1, start_factor=1.5), "not_a_fraction"),
        (lambda: Cosine(num_steps=1, floor=-0.1), "not_a_fraction"),
    ],
)
def test_bad_schedules_are_refused_when_made(make: Callable[[], Schedule], code: str) -> None:
    """A schedule with an invalid argument cannot be created, so it cannot fail during a run."""
    with raises(UserError, code):
        make()


# --- steps from samples and epochs -----------------------------------------------------------------------------------


@given(num_samples=st.integers(0, 10**9), effective=sizes)
def test_steps_of_samples_are_the_fewest_that_see_them(num_samples: int, effective: int) -> None:
    """The number of steps is the smallest that sees the samples."""
    steps = steps_of_samples(num_samples, effective_batch_size=effective)
    assert steps * effective >= num_samples
    assert (steps - 1) * effective < num_samples


@given(tenths=st.integers(0, 1000), steps_per_epoch=st.integers(1, 1000))
def test_parts_of_epochs_are_rounded_up_once(tenths: int, steps_per_epoch: int) -> None:
    """A fraction of an epoch is rounded up in exact arithmetic: 0.1 epochs of 30 steps are 3 steps, not 4."""
    exact = -(-tenths * steps_per_epoch // 10)
    assert steps_of_epochs(tenths / 10, samples_per_epoch=steps_per_epoch * 8, effective_batch_size=8) == exact


# --- saving ----------------------------------------------------------------------------------------------------------


def test_a_resumed_schedule_continues() -> None:
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


stages = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 60)), min_size=1, max_size=4)


@given(given_stages=stages, num_samples=st.integers(0, 300))
def test_ramp_steps_match_a_count(given_stages: list[tuple[int, int]], num_samples: int) -> None:
    """The number of steps matches a step-by-step count with the size of each step's stage."""
    *first, last = [(size, size + more) for size, more in given_stages]
    ramp = BatchRamp(*first, (last[0], None))
    done = steps = 0
    while done < num_samples:
        done, steps = done + ramp.at(done), steps + 1
    assert steps_of_samples(num_samples, effective_batch_size=ramp) == steps


@pytest.mark.parametrize(
    ("given_stages", "code"),
    [
        ((), "no_stages"),
        (((0, None),), "not_a_whole_number"),
        (((4, 100),), "end_of_stage"),
        (((4, None), (8, None)), "end_of_stage"),
        (((8, 4), (16, None)), "stage_too_short"),
        (((8, 0), (16, None)), "not_a_whole_number"),
    ],
)
def test_invalid_ramps_are_refused(given_stages: tuple[Stage, ...], code: str) -> None:
    """An invalid ramp raises an error when it is made."""
    with raises(BatchSizeError, code):
        BatchRamp(*given_stages)


@given(given_stages=stages)
def test_ramps_round_trip(given_stages: list[tuple[int, int]]) -> None:
    """Reading the notation of any ramp gives the same ramp."""
    *first, last = [(size, size + more) for size, more in given_stages]
    ramp = BatchRamp(*first, (last[0], None))
    assert BatchRamp.parse(ramp.notation) == ramp


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("32,128", "not_a_ramp"),
        ("32@5,128@20", "not_a_ramp"),
        ("32:128@20000", "not_a_ramp"),
        ("", "not_a_ramp"),
        ("32,x@5", "not_a_ramp"),
        ("8,16@40,32@40", "stages_out_of_order"),
        ("8,16@0", "stages_out_of_order"),
        ("8,16@4", "stage_too_short"),
        ("0,16@4", "not_a_whole_number"),
    ],
)
def test_invalid_ramp_text_is_refused(text: str, code: str) -> None:
    """The error for invalid text names the fault and shows the notation."""
    with raises(BatchSizeError, code):
        BatchRamp.parse(text)


def test_joined_schedules_can_be_joined() -> None:
    """Parts of joined schedules become parts of the whole."""
    warm_up, first, second = WarmUp(num_steps=2, start_factor=0.1), Cosine(num_steps=4), Cosine(num_steps=3, floor=0.2)
    nested, flat = join_schedules(join_schedules(warm_up, first), second), join_schedules(warm_up, first, second)

    assert [nested(step) for step in range(12)] == [flat(step) for step in range(12)]


def test_seesaw_halves_the_noise_of_the_cosine() -> None:
    """Where the cosine reaches 1/2, 1/4 and 1/8, the batch doubles, and rate / sqrt(batch) is that of the cosine."""
    samples, size = 100_000, 10
    ramp, rates = seesaw(samples, effective_batch_size=size, num_doublings=3)
    cosine = Cosine(num_steps=samples // size)
    assert ramp.sizes == (10, 20, 40, 80)
    for number, begin in enumerate((50_000, 66_667, 76_995)):
        factor = 2.0 ** -(number + 1)
        assert ramp.at(begin + 10) == size / factor
        assert ramp.at(begin - 90) == size / factor / 2
        assert cosine(begin // size) == pytest.approx(factor, abs=1e-3)
        step = ramp.steps_of(begin + 1)
        assert rates(step) == pytest.approx(math.sqrt(factor))
        assert rates(step) / math.sqrt(ramp.at(begin + 10) / size) == pytest.approx(factor)
    assert rates(0) == 1.0


def test_a_ramp_follows_the_measured_noise() -> None:
    """The batch doubles where the noise scale reaches the doubled size, at most to the largest, and never shrinks."""
    measured = [(0, 10.0), (1000, 70.0), (2000, 130.0), (2010, 300.0), (3000, 50.0), (9000, math.inf)]
    ramp = ramp_from_noise(measured, smallest=32, largest=600)
    assert ramp.notation == "32,64@1000,128@2000,512@9000"
    assert ramp_from_noise([], smallest=32, largest=64).sizes == (32,)
    assert ramp_from_noise([(500, math.nan)], smallest=32, largest=64).sizes == (32,)
