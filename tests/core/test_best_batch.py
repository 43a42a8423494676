"""The cost of a larger batch, and the batch size with the lowest time."""

import pytest

from anybatch.core.gradient_noise import BatchCost

COST = BatchCost(critical_batch_size=300.0, overhead_seconds=0.02, seconds_per_sample=0.0005)


def test_the_best_batch_takes_the_least_time() -> None:
    """Of all sizes from 1 to 2,000, the one nearest to `best` takes the least time."""
    fastest = min(range(1, 2001), key=lambda size: COST.seconds(size, by=64))

    assert fastest == round(COST.best)


def test_ranks_share_samples_and_add_a_reduction() -> None:
    """On 4 ranks a sample takes a quarter of the time, and a step the reduction in addition."""
    cost = COST.on_ranks(4, 0.01)

    assert cost.step_seconds(400) == pytest.approx(0.03 + 100 * 0.0005)
    assert cost.best == pytest.approx((300 * 0.03 / 0.000125) ** 0.5)
