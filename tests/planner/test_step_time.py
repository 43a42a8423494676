"""Predicted step times: the roofline, corrections, micro-batches and reductions."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.errors import PlanError
from anybatch.planner.devices import Device, find_device
from anybatch.planner.step_time import (
    BUCKET_BYTES,
    EFFICIENCY,
    HOST_SECONDS,
    LAUNCH_SECONDS,
    CostTrace,
    Operation,
    exposed_seconds,
    fit_costs,
    operation_seconds,
    roofline_seconds,
    step_seconds,
)

CARD = Device(
    name="made up",
    memory_bytes=1,
    flops_per_second={"fp32": 1e9, "bf16": 4e9},
    bytes_per_second=1e6,
    link_bytes_per_second=1e3,
)


def product(m: int, *, phase: str = "forward", micro_batch: int = 0, name: str = "mm") -> Operation:
    """Return a matrix product of `m` rows by 10 and 20."""
    return Operation(
        name=name,
        kind="matmul",
        phase="backward" if phase == "backward" else "forward",
        micro_batch=micro_batch,
        flops=2 * m * 10 * 20,
        num_bytes=4 * (m * 10 + 200) + 4 * m * 20,
        dims=(1, m, 20, 10),
    )


UPDATE = Operation(name="add_", kind="other", phase="update", micro_batch=1, num_bytes=1600)


def trace(m: int, num_micro_batches: int = 2) -> CostTrace:
    """Return a step: products both ways per micro-batch, additions to gradients in later ones, and an update."""
    operations: list[Operation] = []
    for number in range(num_micro_batches):
        both = [product(m, micro_batch=number), product(m, phase="backward", micro_batch=number)]
        adding = dataclasses.replace(UPDATE, phase="backward", micro_batch=number)
        operations += [*both, *[adding] * (number > 0)]
    after = dataclasses.replace(UPDATE, name="mul", phase="forward", micro_batch=num_micro_batches)
    return CostTrace((*operations, after, UPDATE))


def plain_seconds(one: Operation) -> float:
    """Return the roofline time divided by the efficiency, written out."""
    work = max(one.flops / 1e9, one.num_bytes / 1e6)
    return (LAUNCH_SECONDS + work) / EFFICIENCY[one.kind]


def test_an_operation_takes_its_arithmetic_or_its_traffic() -> None:
    """An operation takes its arithmetic or its traffic, the longer of the two, plus a launch; bf16 has its own peak."""
    heavy = Operation(name="mm", kind="matmul", phase="forward", flops=3_000_000_000, num_bytes=10)
    light = Operation(name="add", kind="other", phase="forward", num_bytes=1_500_000)

    assert roofline_seconds(heavy, CARD) == pytest.approx(LAUNCH_SECONDS + 3.0)
    assert roofline_seconds(light, CARD) == pytest.approx(LAUNCH_SECONDS + 1.5)
    assert roofline_seconds(dataclasses.replace(heavy, dtype="bf16"), CARD) == pytest.approx(LAUNCH_SECONDS + 0.75)
    assert operation_seconds([heavy, light], CARD) == pytest.approx(plain_seconds(heavy) + plain_seconds(light))


def test_the_longer_of_host_and_device_counts() -> None:
    """Python's time per operation is hidden by the device's work, and a view takes only that time."""
    views = [Operation(name="t", kind="view", phase="forward")] * 5
    work = [product(64)]

    assert operation_seconds(views, CARD) == pytest.approx(5 * HOST_SECONDS)
    assert operation_seconds([*work, *views], CARD) == plain_seconds(product(64))


@given(m=st.integers(1, 300), traced=st.lists(st.integers(1, 20), min_size=2, max_size=2, unique=True))
def test_costs_lie_on_a_line(m: int, traced: list[int]) -> None:
    """Two traces give the costs at any micro-batch size, as a trace of that size would."""
    line = fit_costs(trace(traced[0]), traced[0], trace(traced[1]), traced[1])
    assert line.at(m) == trace(m)


def test_different_operations_are_refused() -> None:
    """Traces with different operations, or of different lengths, raise with the position."""
    renamed = CostTrace((product(2, name="addmm"), *trace(2).operations[1:]))
    for other, position in ((renamed, 0), (CostTrace(trace(2).operations[:-1]), 6)):
        with pytest.raises(PlanError, match=f"operation {position} is"):
            fit_costs(other, 2, trace(3), 3)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), num_traced=st.integers(1, 3))
def test_a_step_is_the_sum_of_its_parts(sizes: list[int], num_traced: int) -> None:
    """A step's time is the sum of its micro-batches at their sizes and of the operations that run once."""
    line = fit_costs(trace(2, num_traced), 2, trace(3, num_traced), 3)
    found = step_seconds(line, CARD, sizes)
    adds = plain_seconds(UPDATE) * (num_traced > 1)
    micro_batches = sum(2 * plain_seconds(product(m)) for m in sizes) + adds * (len(sizes) - 1)

    assert found.micro_batches == pytest.approx(micro_batches)
    assert found.per_step == pytest.approx(2 * plain_seconds(UPDATE))
    assert found.reduction == 0
    assert found.total == pytest.approx(found.micro_batches + found.per_step)
    assert (found.least, found.greatest) == pytest.approx((found.total * 0.6, found.total * 2))


def test_forwards_that_run_first_are_shared_out() -> None:
    """If all forwards run before the first backward, each micro-batch counts as the mean of those traced."""
    joint = CostTrace(
        (
            *(product(2) for _ in range(3)),
            product(2, phase="backward"),
            product(2, micro_batch=1),
            product(2, phase="backward", micro_batch=1),
        )
    )
    line = fit_costs(joint, 2, CostTrace(tuple(_resized(one) for one in joint.operations)), 3)

    assert step_seconds(line, CARD, [2, 2]).micro_batches == pytest.approx(6 * plain_seconds(product(2)))
    assert step_seconds(line, CARD, [2] * 4).micro_batches == pytest.approx(12 * plain_seconds(product(2)))


def _resized(one: Operation) -> Operation:
    return product(3, phase=one.phase, micro_batch=one.micro_batch)


@given(
    num_bytes=st.integers(1, 10**9),
    world_size=st.integers(2, 64),
    backward=st.floats(0, 100),
)
def test_a_reduction_is_hidden_but_for_its_last_bucket(num_bytes: int, world_size: int, backward: float) -> None:
    """A ring sends the bytes almost twice; a backward hides all except the last bucket."""
    sent = sum(num_bytes / world_size for _ in range(2 * (world_size - 1)))
    whole, exposed = (exposed_seconds(num_bytes, world_size, 1e8, hiding) for hiding in (0.0, backward))

    assert whole == pytest.approx(sent / 1e8)
    assert whole / math.ceil(num_bytes / BUCKET_BYTES) <= exposed * (1 + 1e-12)
    assert whole - backward <= exposed <= whole


def test_float32_convolutions_run_at_tf32_speed() -> None:
    """By default, cuDNN computes float32 convolutions in TF32; matrix products and bf16 keep their own peaks."""
    device, one = find_device("H100"), Operation(name="one", kind="convolution", phase="forward", flops=10**15)

    def seconds(**changes: Any) -> float:
        return roofline_seconds(dataclasses.replace(one, **changes), device) - LAUNCH_SECONDS

    assert seconds() == pytest.approx(one.flops / device.peak("tf32"))
    assert seconds(kind="convolution backward") == pytest.approx(one.flops / device.peak("tf32"))
    assert seconds(kind="matmul") == pytest.approx(one.flops / device.peak("fp32"))
    assert seconds(dtype="bf16") == pytest.approx(one.flops / device.peak("bf16"))
