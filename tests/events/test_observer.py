"""The pace of a run matches a plain computation from the times of its steps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.events.observer import Throughput

SPANS = st.lists(st.floats(0.01, 20.0), min_size=3, max_size=40)


@given(SPANS, st.integers(1, 512))
def test_rate_is_samples_over_time(spans: list[float], num_samples: int) -> None:
    """The rate is samples over time of the latest steps that fill the window, without the first step."""
    pace, now, ends = Throughput(), 5.0, [5.0]
    pace.begin(now)
    for span in spans:
        now += span
        ends.append(now)
        pace.step(now, num_samples)

    full = [number for number, end in enumerate(ends) if number >= 1 and end <= now - 10.0]
    oldest = min(max(full, default=1), len(ends) - 2)
    expected = (len(ends) - 1 - oldest) * num_samples / (now - ends[oldest])
    assert pace.samples_per_second == pytest.approx(expected)


@given(SPANS, st.integers(0, 1_000), st.floats(0.0, 5.0))
def test_time_left_is_steps_left_at_the_mean_pace(spans: list[float], num_left: int, waited: float) -> None:
    """The time left is the mean time per step, without the first, times the remaining steps, minus the time waited."""
    pace, now = Throughput(), 0.0
    pace.begin(now)
    for span in spans:
        now += span
        pace.step(now, 1)

    expected = sum(spans[1:]) / len(spans[1:]) * num_left - waited
    assert pace.seconds_left(now + waited, num_left) == pytest.approx(max(0.0, expected), abs=1e-6)


def test_no_pace_without_a_step() -> None:
    """Before the first step, or while the clock does not advance, the pace is None; a run may begin with a step."""
    pace = Throughput()
    assert (pace.samples_per_second, pace.seconds_left(0.0, 3), pace.seconds_since_begin(0.0)) == (None, None, None)
    pace.other_work(1.0)
    pace.begin(2.0)
    assert (pace.samples_per_second, pace.seconds_left(2.0, 3)) == (None, None)
    pace.step(2.0, 64)
    assert pace.samples_per_second is None

    late = Throughput()
    late.step(1.0, 64)
    late.step(2.0, 64)
    assert late.samples_per_second is not None
    assert math.isclose(late.samples_per_second, 64.0)
