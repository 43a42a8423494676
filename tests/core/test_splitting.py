"""Cutting and dealing partition the batch within every constraint."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.geometry import ceil_div
from anybatch.core.splitting import BatchPlan, Deal, SplitOptions, even_parts, group_sizes, plan_batch, plan_shares
from anybatch.errors import BatchSizeError, CompositionError
from tests.faults import sees
from tests.raising import raises

SIZES = st.none() | st.integers(1, 40)
DEALS: st.SearchStrategy[Deal] = st.sampled_from(["balanced", "fixed"])
OPTIONS = st.builds(SplitOptions, micro_batch_size=SIZES, deal=DEALS, lockstep=st.booleans()) | st.builds(
    SplitOptions, accumulation_steps=SIZES, deal=DEALS, lockstep=st.booleans()
)


def positions(plan: BatchPlan) -> list[int]:
    """Return the positions of all counting samples, in the order of the plan."""
    return [position for unit in plan.units for position in range(unit.start, unit.stop)]


@sees(
    "the ragged tail is dropped",
    "src/anybatch/core/splitting.py",
    "(size,) * full + ((rest,) if rest else ())",
    "(size,) * full",
    also=[
        "tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[1-rank-ragged]",
        "tests/data/test_indexed_batches.py::test_ranks_and_units_partition_an_epoch",
    ],
)
@given(num_samples=st.integers(0, 200), world_size=st.integers(1, 9), split=OPTIONS)
@pytest.mark.slow
def test_units_are_a_partition(num_samples: int, world_size: int, split: SplitOptions) -> None:
    """Every sample is in exactly one counting unit, in global order; no unit is empty, and numbers are consecutive."""
    plan = plan_batch(num_samples, world_size, split)

    assert plan.world_size == world_size
    assert positions(plan) == list(range(num_samples))
    assert all(unit.num_samples > 0 for share in plan.shares for unit in share)
    assert [unit.number for unit in plan.units] == list(range(len(plan.units)))
    assert len({unit.number for share in plan.shares for unit in share}) == sum(map(len, plan.shares))


@pytest.mark.slow
@given(num_samples=st.integers(0, 200), world_size=st.integers(1, 9), split=OPTIONS)
def test_sizes_are_respected(num_samples: int, world_size: int, split: SplitOptions) -> None:
    """No unit exceeds its limit, and the number of steps is the given one, or the smallest that fits."""
    plan = plan_batch(num_samples, world_size, split)
    sizes = [[unit.num_samples for unit in share if unit.weight] for share in plan.shares]
    if split.micro_batch_size is not None:
        assert max(itertools.chain(*sizes), default=0) <= split.micro_batch_size
        if split.deal == "balanced":
            assert [len(share) for share in sizes] == [ceil_div(sum(share), split.micro_batch_size) for share in sizes]
        else:
            assert len(plan.units) == ceil_div(num_samples, split.micro_batch_size)
    if split.accumulation_steps is not None:
        assert all(max(share, default=0) - min(share, default=0) <= 1 for share in sizes)
        assert max(map(len, sizes)) <= split.accumulation_steps
        if split.deal == "balanced":
            assert [len(share) for share in sizes] == [min(sum(share), split.accumulation_steps) for share in sizes]


@sees(
    "a fixed split depends on the number of ranks",
    "src/anybatch/core/splitting.py",
    "sizes = _units_of(num_samples, split.micro_batch_size or share, split)",
    "sizes = _units_of(num_samples, (split.micro_batch_size or share) + world_size - 1, split)",
    also=["tests/engine/test_generators.py::test_dropout_does_not_depend_on_the_number_of_ranks[all_reduce]"],
)
@given(num_samples=st.integers(0, 200), size=st.integers(1, 40), world_sizes=st.lists(st.integers(1, 9), min_size=2))
def test_a_fixed_cut_does_not_depend_on_the_ranks(num_samples: int, size: int, world_sizes: list[int]) -> None:
    """With deal="fixed" and a given size the units are the same on any number of ranks."""
    split = SplitOptions(micro_batch_size=size, deal="fixed")
    assert len({plan_batch(num_samples, world_size, split).units for world_size in world_sizes}) == 1


@sees(
    "a filler unit counts",
    "src/anybatch/core/splitting.py",
    "borrowed.stop, weight=0.0)",
    "borrowed.stop)",
    also=[
        "tests/core/test_splitting.py::test_units_are_a_partition",
        "tests/parallel/test_fsdp.py::test_idle_ranks_run_extra_micro_batches[7]",
    ],
)
@given(num_samples=st.integers(1, 200), world_size=st.integers(1, 9), split=OPTIONS)
def test_lockstep_ranks_run_equally_many_units(num_samples: int, world_size: int, split: SplitOptions) -> None:
    """In lockstep all ranks run the same number of units; added ones have no weight and come last."""
    plan = plan_batch(num_samples, world_size, split)
    weights = [[unit.weight for unit in share] for share in plan.shares]
    assert all(share == sorted(share, reverse=True) and set(share) <= {0.0, 1.0} for share in weights)
    assert sum(unit.num_samples for share in plan.shares for unit in share if unit.weight) == num_samples
    if split.lockstep:
        assert len({len(share) for share in plan.shares}) == 1
    else:
        assert all(unit.weight == 1.0 for share in plan.shares for unit in share)


@sees(
    "samples that do not divide evenly among ranks are dropped",
    "src/anybatch/core/splitting.py",
    "(quotient + 1,) * rest + (quotient,) * (num_parts - rest)",
    "(quotient,) * num_parts",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[2-ranks-ragged]"],
)
@given(total=st.integers(0, 500), num_parts=st.integers(0, 40))
def test_even_parts_differ_by_one(total: int, num_parts: int) -> None:
    """Parts add up to the total, differ by at most one, and the larger ones come first."""
    parts = even_parts(total, num_parts)
    assert len(parts) == num_parts
    assert sum(parts) == (total if num_parts else 0)
    assert list(parts) == sorted(parts, reverse=True)
    assert not parts or parts[0] - parts[-1] <= 1


GROUPS = st.integers(2, 12)


def borders(num_samples: int, group: int) -> set[int]:
    """Return the boundaries of groups, counted one by one."""
    starts = [start for start in range(0, num_samples, group) if start == 0 or num_samples - start > 1]
    return {*starts, num_samples}


@sees(
    "norms: a single last sample is a group",
    "src/anybatch/core/splitting.py",
    """
    if len(sizes) > 1 and sizes[-1] == 1:
        return (*sizes[:-2], group + 1)
""",
    "",
    also=["tests/engine/test_batch_norm.py::test_ghost_groups_are_one_function"],
)
@given(num_samples=st.integers(0, 200), group=GROUPS)
def test_groups_are_a_partition(num_samples: int, group: int) -> None:
    """Groups add up to the batch, all but the last of the given size; only a batch of one has a group of one."""
    sizes = group_sizes(num_samples, group)
    assert sum(sizes) == num_samples
    assert set(itertools.accumulate(sizes, initial=0)) == borders(num_samples, group)
    assert all(size == group for size in sizes[:-1])
    assert 1 not in sizes or num_samples == 1
    assert max(sizes, default=0) <= group + 1


@sees(
    "norms: units split groups",
    "src/anybatch/core/splitting.py",
    "groups, per_unit = group_sizes(num_samples, split.group), max(1, size // split.group)",
    "groups, per_unit = group_sizes(num_samples, 2), max(1, size // 2)",
)
@given(
    num_samples=st.integers(0, 200),
    world_size=st.integers(1, 9),
    group=GROUPS,
    groups_per_unit=st.integers(1, 4) | st.none(),
    more=st.integers(0, 11),
    deal=DEALS,
    lockstep=st.booleans(),
)
def test_units_and_shares_hold_whole_groups(  # noqa: PLR0917 (Hypothesis passes by keyword)
    num_samples: int,
    world_size: int,
    group: int,
    groups_per_unit: int | None,
    more: int,
    deal: Deal,
    lockstep: bool,
) -> None:
    """No group is split, on any number of ranks; no sample is lost or repeated; units are within their limit."""
    size = None if groups_per_unit is None else group * groups_per_unit + more % group
    split = SplitOptions(micro_batch_size=size, deal=deal, lockstep=lockstep, group=group)
    plan = plan_batch(num_samples, world_size, split)
    ends = {bound for share in plan.shares for unit in share for bound in (unit.start, unit.stop)}
    counted = [sum(len(group_sizes(u.num_samples, group)) for u in share if u.weight) for share in plan.shares]

    assert positions(plan) == list(range(num_samples))
    assert ends <= borders(num_samples, group)
    if size is not None:
        assert max((unit.num_samples for unit in plan.units), default=0) <= size + 1
        assert all(unit.num_samples <= size for unit in plan.units if unit.stop != num_samples)
    if deal == "balanced":
        assert max(counted) - min(counted) <= 1


def test_cut_groups_are_refused() -> None:
    """Shares that split a group, a rest of a single sample, and micro-batches below a group raise."""
    whole = SplitOptions(group=4)
    assert [unit.num_samples for unit in plan_shares((8, 4, 5), whole).units] == [8, 4, 5]
    with raises(BatchSizeError, "group_cut"):
        plan_shares((8, 6, 3), whole)
    with raises(BatchSizeError, "group_cut"):
        plan_shares((8, 1), whole)
    with raises(BatchSizeError, "group_too_large"):
        plan_batch(12, 1, SplitOptions(micro_batch_size=3, group=4))


def test_impossible_plans_are_refused() -> None:
    """A negative number of samples, and fixed units of shares that are already dealt, raise."""
    with raises(BatchSizeError, "negative_size"):
        plan_batch(-1, 1, SplitOptions(deal="fixed", micro_batch_size=2))
    with pytest.raises(CompositionError):
        plan_shares((3, 4), SplitOptions(deal="fixed"))


@given(
    num_samples=st.integers(0, 60),
    world_size=st.integers(1, 4),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_positions_of_units_are_a_partition(num_samples: int, world_size: int, size: int, seed: int) -> None:
    """For any permutation, each position is in exactly one counting unit, in the order's order."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    plan = dataclasses.replace(
        plan_batch(num_samples, world_size, SplitOptions(micro_batch_size=size)), order=tuple(order)
    )

    found = [position for unit in plan.units for position in plan.positions(unit)]

    assert found == order
