"""effective batch = ranks x accumulation steps x micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import (
    ceil_div,
    even_size,
    resolve_sizes,
    sizes_to_time,
    smallest_of_the_fastest,
)
from anybatch.core.splitting import SplitOptions, plan_batch
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
    plan = plan_batch(ranks * steps * micro, ranks, SplitOptions(micro_batch_size=micro))
    assert {unit.num_samples for unit in plan.units} == {micro}
    assert {len(share) for share in plan.shares} == {steps}


@sees(
    "the rank share is rounded down",
    "src/anybatch/core/geometry.py",
    "share = ceil_div(effective, world_size)",
    "share = effective // world_size",
)
@given(ranks=SIZES, effective=st.integers(1, 4096), micro=SIZES)
def test_three_sizes_must_agree_with_the_plan(ranks: int, effective: int, micro: int) -> None:
    """Three sizes are accepted exactly if the plan of the batch has that many steps."""
    steps = plan_batch(effective, ranks, SplitOptions(micro_batch_size=micro)).accumulation_steps
    given_all = {"world_size": ranks, "effective_batch_size": effective, "micro_batch_size": micro}
    assert resolve_sizes(**given_all, accumulation_steps=steps).effective_batch_size == effective
    for other in {steps - 1, steps + 1} - {0}:
        with pytest.raises(BatchSizeError):
            resolve_sizes(**given_all, accumulation_steps=other)


def test_a_contradiction_shows_the_product_and_both_fixes() -> None:
    """The error shows the product, and the required value of each of the two factors."""
    with pytest.raises(
        BatchSizeError,
        match=r"effective_batch_size=100 contradicts 4 ranks x accumulation_steps=2 x micro_batch_size=8 = 64.*"
        r"there are 4 accumulation steps; .*is 13\.",
    ):
        resolve_sizes(world_size=4, effective_batch_size=100, micro_batch_size=8, accumulation_steps=2)


def test_more_steps_than_samples_are_refused() -> None:
    """A rank share of 3 samples cannot be split into 4 micro-batches."""
    with raises(BatchSizeError, "too_many_steps"):
        resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=4)
    assert resolve_sizes(world_size=3, effective_batch_size=8, accumulation_steps=3).accumulation_steps == 3


SHARES = st.integers(1, 400)
GROUPS = st.integers(1, 9)


def parts(share: int, size: int, group: int = 1) -> list[int]:
    """Return the micro-batches into which the engine would cut a share."""
    plan = plan_batch(share, 1, SplitOptions(micro_batch_size=size, group=None if group == 1 else group))
    return [unit.num_samples for unit in plan.units]


@given(share=SHARES, limit=st.integers(1, 500))
def test_even_parts(share: int, limit: int) -> None:
    """Parts cover the share within the limit, are as few as possible, and all but the last are equal.

    No other size with as few parts has a larger last one.
    """
    size = even_size(share, limit)
    found = parts(share, size)

    assert sum(found) == share
    assert max(found) == size <= limit
    assert len(found) == ceil_div(share, limit)
    others = [parts(share, other) for other in range(1, min(limit, share) + 1)]
    assert found[-1] == max(other[-1] for other in others if len(other) == len(found))


@given(share=SHARES, limit=st.integers(2, 500), group=st.integers(2, 9))
def test_even_parts_of_whole_groups(share: int, limit: int, group: int) -> None:
    """A part has complete groups, within the limit if a group fits, and the engine can cut the share accordingly."""
    size = even_size(share, limit, group=group)

    assert size % group == 0 or size == share
    assert size <= max(limit, min(group, share))
    assert sum(parts(share, size, group)) == share


@given(
    share=SHARES,
    largest=st.integers(1, 400),
    seconds=st.dictionaries(st.integers(1, 400), st.floats(1e-6, 10.0), max_size=8),
    group=GROUPS,
)
def test_few_sizes_and_none_above_the_largest(share: int, largest: int, seconds: dict[int, float], group: int) -> None:
    """One to four increasing sizes are timed, including the largest that fits, all for even parts."""
    largest = max(group, min(largest, share))
    found = sizes_to_time(share, largest, seconds, group=group)

    assert 1 <= len(found) <= 4
    assert list(found) == sorted(set(found))
    assert found[-1] == even_size(share, largest, group=group)
    assert min(found) >= 1
    assert max(found) <= max(largest, min(group, share))


@given(st.dictionaries(st.integers(1, 300), st.floats(1.0, 1.1), min_size=1))
def test_the_smallest_within_three_percent(seconds: dict[int, float]) -> None:
    """The chosen size costs at most 3% more than the best, and every smaller one costs more than that."""
    chosen = smallest_of_the_fastest(seconds)

    assert seconds[chosen] <= 1.03 * min(seconds.values())
    assert all(value > 1.03 * min(seconds.values()) for size, value in seconds.items() if size < chosen)
