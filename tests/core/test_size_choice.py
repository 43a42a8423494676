"""The sizes to time and the chosen size: parts cover the share, stay below the bound, and are even."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import (
    SecondsFit,
    ceil_div,
    even_size,
    fit_seconds,
    sizes_to_time,
    smallest_of_the_fastest,
    step_seconds,
)
from anybatch.core.splitting import Cut, plan_batch

SHARES = st.integers(1, 400)
GROUPS = st.integers(1, 9)


def parts(share: int, size: int, group: int = 1) -> list[int]:
    """Return the micro-batches into which the engine would cut a share."""
    plan = plan_batch(share, 1, Cut(micro_batch_size=size, group=None if group == 1 else group))
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


def test_a_share_of_64_with_room_for_20() -> None:
    """Four parts of 16, not 20 + 20 + 20 + 4."""
    assert even_size(64, 20) == 16
    assert parts(64, 16) == [16, 16, 16, 16]


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
    """One to five increasing sizes are timed, including the largest that fits, all for even parts."""
    largest = max(group, min(largest, share))
    found = sizes_to_time(share, largest, seconds, group=group)

    assert 1 <= len(found) <= 5
    assert list(found) == sorted(set(found))
    assert found[-1] == even_size(share, largest, group=group)
    assert min(found) >= 1
    assert max(found) <= max(largest, min(group, share))


def test_sizes_for_a_share_of_256() -> None:
    """The timed sizes are the largest, half, a quarter, the knee of the line, and the best so far, for even parts."""
    line = SecondsFit(fixed_seconds=0.001, sample_seconds=0.0005)  # knee: 19 * 0.001 / 0.0005 = 38
    seen = {size: line.seconds(size) for size in (2, 4, 8)}
    seen |= {16: 0.0081, 32: 0.012, 64: 0.06, 128: 0.12, 256: 0.24}

    assert sizes_to_time(256, 256, seen) == (32, 37, 64, 128, 256)  # 38 leaves 7 parts of at most 37


@given(fixed=st.floats(1e-5, 1.0), slope=st.floats(1e-5, 1.0))
def test_line_and_knee(fixed: float, slope: float) -> None:
    """The fit through points of a line is that line, and its knee is where 95% of its limit is reached."""
    line = fit_seconds({size: fixed + slope * size for size in (2, 4, 8, 16)})

    assert line is not None
    assert line.fixed_seconds == pytest.approx(fixed, rel=1e-6, abs=1e-9)
    assert line.sample_seconds == pytest.approx(slope, rel=1e-6)
    knee = SecondsFit(fixed, slope).knee
    assert (knee + 1) / SecondsFit(fixed, slope).seconds(knee + 1) >= 0.95 / slope * (1 - 1e-9)
    if knee > 1:
        assert (knee - 1) / SecondsFit(fixed, slope).seconds(knee - 1) <= 0.95 / slope * (1 + 1e-9)


def test_no_line() -> None:
    """One point, or falling times, give no line; a negative time at size 0 becomes zero."""
    assert fit_seconds({}) is None
    assert fit_seconds({2: 1.0}) is None
    assert fit_seconds({2: 1.0, 4: 0.5}) is None
    assert fit_seconds({2: 1.0, 4: 3.0}) == SecondsFit(0.0, 1.0)


@given(share=SHARES, size=st.integers(1, 400), fixed=st.floats(0.0, 1.0), slope=st.floats(1e-5, 1.0))
def test_a_step_is_the_sum_of_its_micro_batches(share: int, size: int, fixed: float, slope: float) -> None:
    """If the line is right, a step takes the sum of its micro-batches, including the ragged one."""
    size = min(size, share)
    line = SecondsFit(fixed, slope)

    by_hand = sum(line.seconds(part) for part in parts(share, size))
    assert step_seconds(share, size, line.seconds(size), line) == pytest.approx(by_hand, rel=1e-9)


def test_the_ragged_last_one_counts() -> None:
    """Without a line the last micro-batch counts like a full one: 20 + 20 + 20 + 4 is four times 20."""
    assert step_seconds(64, 20, 1.0, None) == 4.0
    assert step_seconds(60, 20, 1.0, None) == 3.0


@given(st.dictionaries(st.integers(1, 300), st.floats(1.0, 1.1), min_size=1))
def test_the_smallest_within_three_percent(seconds: dict[int, float]) -> None:
    """The chosen size costs at most 3% more than the best, and every smaller one costs more than that."""
    chosen = smallest_of_the_fastest(seconds)

    assert seconds[chosen] <= 1.03 * min(seconds.values())
    assert all(value > 1.03 * min(seconds.values()) for size, value in seconds.items() if size < chosen)
