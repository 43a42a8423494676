"""Predicted step times: the roofline, corrections, micro-batches and reductions."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.errors import PlanError
from anybatch.planner.devices import DEVICES, find_device
from anybatch.planner.step_time import (
    UNMEASURED_BAND,
    CostTrace,
    Operation,
    Rates,
    Reduction,
    fit_costs,
    operation_seconds,
    rates_of,
    step_seconds,
)

RATES = Rates(
    name="made up",
    flops_per_second={"fp32": 1e9, "bf16": 4e9},
    bytes_per_second=1e6,
    launch_seconds=0.25,
    band=(0.5, 2.0),
)


def product(m: int, *, phase: str = "forward", micro_batch: int = 0, name: str = "mm") -> Operation:
    """Return a matrix product of `m` rows by 10 and 20."""
    return Operation(
        name=name,
        kind="matmul",
        phase="backward" if phase == "backward" else "forward",
        micro_batch=micro_batch,
        flops=2 * m * 10 * 20,
        bytes_read=4 * (m * 10 + 200),
        bytes_written=4 * m * 20,
        dims=(1, m, 20, 10),
    )


UPDATE = Operation(name="add_", kind="other", phase="update", micro_batch=1, bytes_read=800, bytes_written=800)


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
    """Return the roofline time, written out."""
    peak = 4e9 if one.dtype == "bf16" else 1e9
    return 0.25 + max(one.flops / peak, (one.bytes_read + one.bytes_written) / 1e6)


def test_an_operation_takes_its_arithmetic_or_its_traffic() -> None:
    """An operation takes its arithmetic or its traffic, the longer of the two, plus a launch; bf16 has its own peak."""
    heavy = Operation(name="mm", kind="matmul", phase="forward", flops=3_000_000_000, bytes_read=10)
    light = Operation(name="add", kind="other", phase="forward", bytes_read=1_000_000, bytes_written=500_000)

    assert operation_seconds([heavy], RATES) == pytest.approx(3.25)
    assert operation_seconds([light], RATES) == pytest.approx(1.75)
    assert operation_seconds([dataclasses.replace(heavy, dtype="bf16")], RATES) == pytest.approx(1.0)
    assert operation_seconds([dataclasses.replace(heavy, dtype="fp16")], RATES) == pytest.approx(3.25)
    assert operation_seconds([heavy, light], RATES) == pytest.approx(5.0)


def test_the_host_is_added_or_hidden() -> None:
    """Python's time per operation is added on a CPU; on an accelerator, the longer of host and device time counts."""
    operations = [product(1), product(1, phase="backward")]
    host = dataclasses.replace(RATES, host_seconds={"forward": 2.0, "backward": 3.0})
    alone = operation_seconds(operations, RATES)

    assert operation_seconds(operations, host) == pytest.approx(alone + 5.0)
    assert operation_seconds(operations, dataclasses.replace(host, overlaps=True)) == pytest.approx(5.0)
    slow = dataclasses.replace(host, overlaps=True, launch_seconds=100.0)
    assert operation_seconds(operations, slow) == pytest.approx(200.0, rel=1e-2)


def test_a_kind_reaches_a_share_of_the_roofline() -> None:
    """An operation takes its roofline time divided by the efficiency of its kind, or exactly that for another kind."""
    rates = dataclasses.replace(RATES, efficiency={"matmul": 0.2})

    assert operation_seconds([product(64)], rates) == pytest.approx(5 * plain_seconds(product(64)))
    assert operation_seconds([UPDATE], rates) == plain_seconds(UPDATE)


def test_devices_of_the_table_are_uncalibrated() -> None:
    """Devices of the table have uncalibrated predictions with a wide band; faster devices take less time."""
    operations = [product(4096), product(4096, phase="backward"), UPDATE]
    for device in DEVICES:
        rates = rates_of(device)
        assert not rates.is_calibrated
        assert rates.band == UNMEASURED_BAND
        assert operation_seconds(operations, rates) >= sum(one.flops for one in operations) / device.peak("fp32")
    large = [dataclasses.replace(product(4096), flops=10**13, dtype="bf16")]
    older, newer = (operation_seconds(large, rates_of(find_device(name))) for name in ("A100-80", "H100"))
    assert newer < older


def test_tf32_is_asked_for() -> None:
    """float32 products run at the TF32 rate only if TF32 is enabled."""
    device = find_device("A100-80")
    assert rates_of(device).flops_per_second["fp32"] == device.peak("fp32")
    assert rates_of(device, tf32=True).flops_per_second["fp32"] == device.peak("tf32")


@given(m=st.integers(1, 300), traced=st.lists(st.integers(1, 20), min_size=2, max_size=2, unique=True))
def test_costs_lie_on_a_line(m: int, traced: list[int]) -> None:
    """Two traces give the costs at any micro-batch size, as a trace of that size would."""
    line = fit_costs(trace(traced[0]), traced[0], trace(traced[1]), traced[1])
    assert line.at(m) == trace(m)


def test_other_operations_are_refused() -> None:
    """Traces with different operations, or of the same size, raise."""
    renamed = CostTrace((product(2, name="addmm"), *trace(2).operations[1:]))
    with pytest.raises(
        PlanError, match="operation 0 is addmm in forward at micro-batch size 2, but mm in forward at 3"
    ):
        fit_costs(renamed, 2, trace(3), 3)
    with pytest.raises(PlanError, match="7 operations at 2, 6 at 3"):
        fit_costs(trace(2), 2, CostTrace(trace(3).operations[:-1]), 3)
    with pytest.raises(PlanError, match="need two micro-batch sizes"):
        fit_costs(trace(2), 2, trace(2), 2)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), num_traced=st.integers(1, 3))
def test_a_step_is_the_sum_of_its_parts(sizes: list[int], num_traced: int) -> None:
    """A step's time is the sum of its micro-batches at their sizes and of the operations that run once."""
    line = fit_costs(trace(2, num_traced), 2, trace(3, num_traced), 3)
    found = step_seconds(line, RATES, sizes)
    adds = plain_seconds(UPDATE) * (num_traced > 1)
    micro_batches = sum(2 * plain_seconds(product(m)) for m in sizes) + adds * (len(sizes) - 1)

    assert found.micro_batches == pytest.approx(micro_batches)
    assert found.per_step == pytest.approx(2 * plain_seconds(UPDATE))
    assert found.reduction == 0
    assert found.total == pytest.approx(found.micro_batches + found.per_step)
    assert (found.least, found.greatest) == pytest.approx((found.total / 2, found.total * 2))


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

    assert step_seconds(line, RATES, [2, 2]).micro_batches == pytest.approx(6 * plain_seconds(product(2)))
    assert step_seconds(line, RATES, [2] * 4).micro_batches == pytest.approx(12 * plain_seconds(product(2)))


def _resized(one: Operation) -> Operation:
    return product(3, phase=one.phase, micro_batch=one.micro_batch)


@given(
    num_bytes=st.integers(1, 10**9),
    world_size=st.integers(2, 64),
    backward=st.floats(0, 100),
)
def test_a_reduction_is_hidden_but_for_its_last_bucket(num_bytes: int, world_size: int, backward: float) -> None:
    """A ring sends the bytes almost twice; a backward hides all except the last bucket."""
    one = Reduction(num_bytes=num_bytes, world_size=world_size, link_bytes_per_second=1e8)
    sent = sum(num_bytes / world_size for _ in range(2 * (world_size - 1)))

    assert one.seconds == pytest.approx(sent / 1e8)
    assert one.exposed_seconds(0.0) == one.seconds
    exposed = one.exposed_seconds(backward)
    assert one.seconds / math.ceil(num_bytes / one.bucket_bytes) <= exposed * (1 + 1e-12)
    assert exposed >= one.seconds - backward
    assert exposed <= one.seconds


def test_the_same_batch_on_one_card_and_on_eight() -> None:
    """Eight cards take less time than one but more than an eighth; one card has no reduction."""
    line = fit_costs(trace(2), 2, trace(3), 3)
    one = step_seconds(line, RATES, [16] * 8)
    link = Reduction(num_bytes=800, world_size=8, link_bytes_per_second=1e3)
    eight = step_seconds(line, RATES, [16], reduction=link)

    assert one.total / 8 < eight.total < one.total
    assert eight.reduction > 0
    assert step_seconds(line, RATES, [16], reduction=dataclasses.replace(link, world_size=1)).reduction == 0


def test_nothing_takes_no_time() -> None:
    """A trace without operations takes no time, and a rank without samples only the time of the update."""
    nothing = fit_costs(CostTrace(()), 2, CostTrace(()), 3)
    assert step_seconds(nothing, RATES, [4]).total == 0
    idle = step_seconds(fit_costs(trace(2), 2, trace(3), 3), RATES, [])
    assert (idle.micro_batches, idle.total) == (0, idle.per_step)


def test_views_cost_the_host_only() -> None:
    """On an accelerator a view takes no time."""
    view = Operation(name="t", kind="view", phase="forward")
    rates = dataclasses.replace(RATES, overlaps=True)
    assert operation_seconds(itertools.repeat(view, 5), rates) == 0
    assert operation_seconds([view], RATES) == 0.25


def test_float32_convolutions_run_at_tf32_speed() -> None:
    """By default, cuDNN computes float32 convolutions in TF32; matrix products and bf16 keep their own peaks."""
    device = find_device("H100")
    rates = rates_of(device)
    flops = 10**15

    def seconds(kind: str, dtype: str) -> float:
        one = Operation(name="one", kind=kind, phase="forward", dtype=dtype, flops=flops)  # type: ignore[arg-type]
        return rates.roofline_seconds(one) - rates.launch_seconds

    assert seconds("convolution", "fp32") == pytest.approx(flops / device.peak("tf32"))
    assert seconds("convolution backward", "fp32") == pytest.approx(flops / device.peak("tf32"))
    assert seconds("matmul", "fp32") == pytest.approx(flops / device.peak("fp32"))
    assert seconds("convolution", "bf16") == pytest.approx(flops / device.peak("bf16"))
