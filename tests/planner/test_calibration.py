"""Measuring a device, with a clock that the test turns: what it says is what is found."""

import itertools
from collections.abc import Callable

import pytest
import torch

from anybatch.memory.torch_internals import FakeTensorMode
from anybatch.planner.cost import calibration
from anybatch.planner.cost.calibration import measure_rates
from anybatch.planner.cost.calibration_programs import Program, programs, small_program
from anybatch.planner.cost.step_time import Operation, operation_seconds


class Meter:
    """A clock that moves by the same amount at every look."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.looks = itertools.count()

    def __call__(self) -> float:
        """Return how late it is."""
        return next(self.looks) * self.seconds


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure with a few of the programs only, as all of them take seconds."""

    def few(times: int) -> list[Callable[[], Program]]:
        return [small_program, *programs(times)[1:5]]

    monkeypatch.setattr(calibration, "programs", few)


def small_step() -> list[Operation]:
    """Return the operations of the small program's forward and backward."""
    operations = calibration._noted(small_program())  # noqa: SLF001 (what the measuring sees)
    return [one for one in operations if one.phase in {"forward", "backward"}]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow
def test_timing_one_by_one_costs_nothing_in_the_end() -> None:
    """A program is predicted to take what it took as a whole, not what its operations took with a look at each.

    With a clock that moves a second per look, each of some hundred operations takes a second, and so do all together.
    """
    rates = measure_rates("meter", Meter(1.0))
    step = small_step()

    assert rates.name == "meter"
    assert rates.is_calibrated
    assert len(step) > 100
    assert operation_seconds(step, rates) == pytest.approx(1.0, rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_slower_device_is_found_slower() -> None:
    """If everything takes a thousand times as long, so does every prediction."""
    fast, slow = (measure_rates("meter", Meter(seconds)) for seconds in (1e-1, 1e2))
    step = small_step()

    assert operation_seconds(step, slow) == pytest.approx(1000 * operation_seconds(step, fast), rel=1e-6)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.slow
def test_random_numbers_are_left_alone() -> None:
    """Measuring draws random numbers of its own, and none of the caller's."""
    before = torch.get_rng_state()
    measure_rates("meter", Meter(1.0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_programs_cover_what_networks_do() -> None:
    """The programs run every kind of operation, forwards, backwards and in updates, and leave no gradient."""
    seen: set[tuple[str, str]] = set()
    for make in programs():
        program = make()
        if sum(parameter.numel() for parameter in program.parameters) < 200_000:
            operations = calibration._noted(program)  # noqa: SLF001 (what the measuring sees)
            seen |= {(one.kind, one.phase) for one in operations}
            assert all(parameter.grad is None for parameter in program.parameters)

    kinds = ("view", "matmul", "convolution", "convolution backward", "attention", "attention backward", "other")
    assert {kind for kind, _ in seen} == {*kinds, "foreach"}
    assert {("other", "update"), ("foreach", "update")} <= seen


@pytest.mark.slow
def test_larger_programs_run_the_same_operations_with_more_work() -> None:
    """Enlarged for an accelerator, each program runs the same operations, moves more bytes and multiplies more."""
    num_compared = 0
    with FakeTensorMode():
        for small, large in zip(programs(), programs(4), strict=True):
            program, enlarged = small(), large()
            if program.optimizer is not None:  # its step reads numbers, and fake tensors hold none
                continue
            before, after = (calibration._noted(one) for one in (program, enlarged))  # noqa: SLF001 (what the measuring sees)
            assert [one.name for one in before] == [one.name for one in after]
            assert sum(one.num_bytes for one in after) >= 3 * sum(one.num_bytes for one in before)
            assert sum(one.flops for one in after) >= 16 * sum(one.flops for one in before)
            num_compared += 1
    assert num_compared > 50
