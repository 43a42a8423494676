"""A plan can cut samples in another order than the batch's without loss or duplicates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.splitting import Cut, plan_batch
from anybatch.errors import BatchSizeError
from tests.raising import raises


@given(
    num_samples=st.integers(0, 60),
    world_size=st.integers(1, 4),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_positions_of_units_are_a_partition(num_samples: int, world_size: int, size: int, seed: int) -> None:
    """For any permutation, each position is in exactly one counting unit, in the order's order."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    plan = plan_batch(num_samples, world_size, Cut(micro_batch_size=size)).in_order(order)

    found = [position for unit in plan.units for position in plan.positions(unit)]

    assert found == order


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    """An order with a missing, repeated or invalid position raises, as it would lose or repeat a sample."""
    with raises(BatchSizeError, "not-a-permutation"):
        plan_batch(3, 1, Cut()).in_order(order)
