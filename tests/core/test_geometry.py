"""effective batch = ranks x accumulation steps x micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import resolve_sizes
from anybatch.core.splitting import Cut, plan_batch
from anybatch.errors import BatchSizeError
from tests.faults import sees
from tests.raising import raises

SIZES = st.integers(1, 64)


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
    with raises(BatchSizeError, "too-many-steps"):
        resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=4)
    assert resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=3).accumulation_steps == 3
