"""effective batch = ranks x accumulation steps x micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import ceil_div, resolve_sizes
from anybatch.core.splitting import Cut, plan_batch
from anybatch.errors import BatchSizeError
from tests.faults import sees

SIZES = st.integers(1, 64)


@given(numerator=st.integers(0, 10**30), denominator=st.integers(1, 10**15))
def test_division_rounds_up(numerator: int, denominator: int) -> None:
    """ceil_div is the smallest integer not below the quotient, also beyond the range of floats."""
    found = ceil_div(numerator, denominator)
    assert found * denominator >= numerator > (found - 1) * denominator


@given(ranks=SIZES, steps=SIZES, micro=SIZES)
@pytest.mark.slow
def test_the_product_follows_from_the_factors(ranks: int, steps: int, micro: int) -> None:
    """The effective batch size is the product of micro-batch size, accumulation steps and ranks, as in the plan."""
    sizes = resolve_sizes(world_size=ranks, micro_batch_size=micro, accumulation_steps=steps)
    assert sizes.effective_batch_size == ranks * steps * micro
    plan = plan_batch(ranks * steps * micro, ranks, Cut(micro_batch_size=micro))
    assert {unit.num_samples for unit in plan.units} == {micro}
    assert {len(share) for share in plan.shares} == {steps}


@sees(
    "the share of a rank is rounded down",
    "src/anybatch/core/geometry.py",
    "share = ceil_div(effective, world_size)",
    "share = effective // world_size",
)
@given(ranks=SIZES, effective=st.integers(1, 4096), micro=SIZES)
def test_all_three_agree_if_and_only_if_the_plan_has_that_many_steps(ranks: int, effective: int, micro: int) -> None:
    """Three sizes are accepted exactly if the plan of the batch has that many steps."""
    steps = plan_batch(effective, ranks, Cut(micro_batch_size=micro)).accumulation_steps
    given_all = {"world_size": ranks, "effective_batch_size": effective, "micro_batch_size": micro}
    assert resolve_sizes(**given_all, accumulation_steps=steps).effective_batch_size == effective
    for other in {steps - 1, steps + 1} - {0}:
        with pytest.raises(BatchSizeError):
            resolve_sizes(**given_all, accumulation_steps=other)


@given(ranks=SIZES, effective=st.integers(1, 4096), micro=SIZES)
def test_what_was_not_given_stays_open(ranks: int, effective: int, micro: int) -> None:
    """The number of accumulation steps depends on each batch, so it is not stored."""
    sizes = resolve_sizes(world_size=ranks, effective_batch_size=effective, micro_batch_size=micro)
    assert sizes.accumulation_steps is None
    assert sizes.product == ""
    assert resolve_sizes(world_size=ranks).effective_batch_size is None


@pytest.mark.parametrize("name", ["effective_batch_size", "micro_batch_size", "accumulation_steps", "world_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_sizes_are_whole_numbers_from_one_on(name: str, value: object) -> None:
    """Sizes that are not positive integers, including booleans and floats, raise with their name and value."""
    sizes = {"world_size": 1, name: value}
    with pytest.raises(BatchSizeError, match=f"{name}={value!r} must be"):
        resolve_sizes(**sizes)  # type: ignore[arg-type]


def test_a_contradiction_shows_the_product_and_both_ways_out() -> None:
    """The error shows the product, and the required value of each of the two factors."""
    with pytest.raises(
        BatchSizeError,
        match=r"effective_batch_size=100 contradicts 4 ranks x accumulation_steps=2 x micro_batch_size=8 = 64.*"
        r"would be 4; .*would be 13\.",
    ):
        resolve_sizes(world_size=4, effective_batch_size=100, micro_batch_size=8, accumulation_steps=2)


def test_more_steps_than_samples_are_refused() -> None:
    """A rank share of 3 samples cannot be split into 4 micro-batches."""
    with pytest.raises(BatchSizeError, match=r"accumulation_steps=4 is more than the 3 samples .*Use at most 3"):
        resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=4)
    assert resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=3).accumulation_steps == 3


def test_the_product_can_be_told() -> None:
    """The source of the effective size is printed in the notation of the options."""
    assert resolve_sizes(world_size=1, micro_batch_size=16, accumulation_steps=4).product == (
        " = 1 rank x 4 accumulation steps x 16"
    )
    assert "2 ranks" in resolve_sizes(world_size=2, micro_batch_size=16, accumulation_steps=4).product
