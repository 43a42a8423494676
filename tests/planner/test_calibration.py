"""Measuring a device with a fake clock gives the expected rates."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from anybatch.memory.torch_internals import FakeTensorMode
from anybatch.planner import calibration
from anybatch.planner.calibration import Program, measure_rates, programs, rates_from, small_program
from anybatch.planner.step_time import Operation, operation_seconds


class Meter:
    """A clock that advances by the same amount at each call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.looks = itertools.count()

    def __call__(self) -> float:
        """Return the current time."""
        return next(self.looks) * self.seconds


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with only a few of the programs, as all of them take seconds."""

    def few(times: int) -> list[Callable[[], Program]]:
        return [small_program, *programs(times)[1:5]]

    monkeypatch.setattr(calibration, "programs", few)


def small_step() -> list[Operation]:
    """Return the operations of the small program's forward and backward."""
    operations = calibration._noted(small_program())  # noqa: SLF001 (the operations that calibration measures)
    return [one for one in operations if one.phase in {"forward", "backward"}]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow
def test_timing_one_by_one_costs_nothing_in_the_end() -> None:
    """A program is predicted to take its time as a whole, not the sum of its separately timed operations.

    The clock advances one second per call: over 100 operations take a second each, and so does the whole program.
    The efficiency of a kind is a mean, so the prediction is not exact.
    """
    rates = measure_rates("meter", Meter(1.0))
    step = small_step()

    assert rates.name == "meter"
    assert rates.is_calibrated
    assert len(step) > 100
    assert 0.5 < operation_seconds(step, rates) < 2.0


def test_rates_follow_the_timed_operations() -> None:
    """Products at one speed are predicted exactly; two speeds of one kind are averaged."""
    sizes = (10**6, 2 * 10**6, 4 * 10**6)
    adds = [(Operation(name="add", kind="other", phase="forward", bytes_read=size), size / 1e9) for size in sizes]
    slow = [(dataclasses.replace(one, name="exp"), 4 * seconds) for one, seconds in adds]
    products = [(Operation(name="mm", kind="matmul", phase="forward", flops=size), size / 1e5) for size in sizes]

    rates = rates_from("made up", [*adds, *slow, *products])

    assert rates.is_calibrated
    for rows, error in ((products, 0.01), ([*adds, *slow], 0.5)):
        predicted = operation_seconds([one for one, _ in rows], rates)
        assert predicted == pytest.approx(sum(seconds for _, seconds in rows), rel=error)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_slower_device_is_found_slower() -> None:
    """If everything takes 1000 times as long, so does every prediction."""
    fast, slow = (measure_rates("meter", Meter(seconds)) for seconds in (1e-1, 1e2))
    step = small_step()

    assert operation_seconds(step, slow) == pytest.approx(1000 * operation_seconds(step, fast), rel=1e-6)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow
def test_random_numbers_are_left_alone() -> None:
    """Measuring does not change the caller's random state."""
    before = torch.get_rng_state()
    measure_rates("meter", Meter(1.0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_programs_cover_what_networks_do() -> None:
    """The programs run every kind of operation in forward, backward and update, and leave no gradients."""
    seen: set[tuple[str, str]] = set()
    for make in programs():
        program = make()
        if sum(parameter.numel() for parameter in program.parameters) < 300_000:
            operations = calibration._noted(program)  # noqa: SLF001 (the operations that calibration measures)
            seen |= {(one.kind, one.phase) for one in operations}
            assert all(parameter.grad is None for parameter in program.parameters)

    kinds = ("view", "matmul", "convolution", "convolution backward", "attention", "attention backward", "other")
    assert {kind for kind, _ in seen} == {*kinds, "foreach"}
    assert {("other", "update"), ("foreach", "update")} <= seen


@pytest.mark.slow
def test_larger_programs_run_the_same_operations_with_more_work() -> None:
    """The programs for an accelerator run the same operations, with more bytes and FLOPs."""
    num_compared = 0
    with FakeTensorMode():
        for small, large in zip(programs(), programs(4), strict=True):
            program, enlarged = small(), large()
            if program.optimizer is not None:  # its step reads values, which fake tensors do not have
                continue
            before, after = (calibration._noted(one) for one in (program, enlarged))  # noqa: SLF001 (as measured)
            assert [one.name for one in before] == [one.name for one in after]
            assert sum(one.num_bytes for one in after) >= 3 * sum(one.num_bytes for one in before)
            assert sum(one.flops for one in after) >= 16 * sum(one.flops for one in before)
            num_compared += 1
    assert num_compared > 25
