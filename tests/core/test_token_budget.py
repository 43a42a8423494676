"""A split by length is a partition within its cap, at minimum cost, and dealt evenly to ranks."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anybatch.core.batch import Placement
from anybatch.core.splitting import BatchPlan, SplitOptions
from anybatch.core.token_budget import SampleLengths, plan_by_length, token_budget
from anybatch.errors import BatchSizeError, DataError, UserError
from tests.faults import sees
from tests.raising import raises

LENGTHS = st.lists(st.integers(0, 40), max_size=40)


def costs_of(plan: BatchPlan, lengths: SampleLengths, fixed: float) -> list[list[float]]:
    """Return the cost of each micro-batch, by rank, from the definition."""
    occupied = lengths.occupied_tokens
    found = []
    for share in plan.shares:
        units = [[occupied[place] for place in plan.positions(unit)] for unit in share]
        found.append([fixed + (sum(unit) if lengths.packed else len(unit) * max(unit)) for unit in units])
    return found


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every division of items into groups, in any order."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for number, part in enumerate(parts):
            yield [*parts[:number], [first, *part], *parts[number + 1 :]]


def least_cost(lengths: Sequence[int], cap: int, fixed: float, *, packed: bool = False) -> float:
    """Return the cost of the cheapest of all partitions within the cap."""

    def cost(part: list[int]) -> float:
        tokens = sum(part) if packed else len(part) * max(part)
        return fixed + tokens if tokens <= cap or len(part) == 1 else math.inf

    return min(sum(map(cost, parts)) for parts in partitions(lengths))


@sees(
    "micro-batches of samples of one length may hold one sample more than the cap",
    "src/anybatch/core/token_budget.py",
    "maximum = cap // length if length else num_samples",
    "maximum = cap // length + 1 if length else num_samples",
)
@sees(
    "packed bins are filled beyond the cap",
    "src/anybatch/core/token_budget.py",
    "at = bisect_left(rooms, (length, -1))",
    "at = bisect_left(rooms, (length - 1, -1))",
)
@given(
    lengths=LENGTHS,
    world_size=st.integers(1, 4),
    cap=st.integers(40, 200),
    fixed=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    packed=st.booleans(),
    multiple_of=st.sampled_from([1, 8]),
    lockstep=st.booleans(),
    deal=st.sampled_from(["balanced", "fixed"]),
)
@example(  # one token too much for one bin
    lengths=[21, 20],
    world_size=1,
    cap=40,
    fixed=1.0,
    packed=True,
    multiple_of=1,
    lockstep=False,
    deal="balanced",
)
def test_a_cut_is_a_partition_within_the_cap(  # noqa: PLR0917 (drawn)
    lengths: list[int],
    world_size: int,
    cap: int,
    fixed: float,
    packed: bool,
    multiple_of: int,
    lockstep: bool,
    deal: str,
) -> None:
    """Each sample is in exactly one counting micro-batch, none of which is empty or above the cap."""
    sample_lengths = SampleLengths(tokens=lengths, packed=packed, multiple_of=multiple_of)
    split = SplitOptions(lockstep=lockstep, deal=deal)  # type: ignore[arg-type]  # either
    plan = plan_by_length(sample_lengths, world_size, split, token_budget(cap, fixed_tokens=fixed))

    occupied = sample_lengths.occupied_tokens
    found = [list(plan.positions(unit)) for unit in plan.units]
    assert sorted(itertools.chain.from_iterable(found)) == list(range(len(lengths)))
    assert all(found)
    for unit in found:
        tokens = [occupied[place] for place in unit]
        assert (sum(tokens) if packed else len(tokens) * max(tokens)) <= cap
    if lockstep and lengths:
        assert len({len(share) for share in plan.shares}) == 1
    assert plan.world_size == world_size


@sees(
    "a split by length uses the most expensive micro-batch that fits",
    "src/anybatch/core/token_budget.py",
    "lowest, begin = min((best[i]",
    "lowest, begin = max((best[i]",
)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=7),
    cap=st.integers(9, 30),
    fixed=st.sampled_from([0.0, 0.5, 3.0, 20.0]),
)
def test_a_padded_cut_is_the_cheapest_of_all(lengths: list[int], cap: int, fixed: float) -> None:
    """No partition within the cap, sorted or not, costs less."""
    plan = plan_by_length(SampleLengths(tokens=lengths), 1, SplitOptions(), token_budget(cap, fixed_tokens=fixed))
    (costs,) = costs_of(plan, SampleLengths(tokens=lengths), fixed)

    assert sum(costs) == pytest.approx(least_cost(lengths, cap, fixed))


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=7), cap=st.integers(9, 20))
def test_packed_cuts_have_few_micro_batches(lengths: list[int], cap: int) -> None:
    """Packing uses at most one bin more than the minimum on small batches, without padding."""
    sample_lengths = SampleLengths(tokens=lengths, packed=True)
    plan = plan_by_length(sample_lengths, 1, SplitOptions(), token_budget(cap, fixed_tokens=1.0))

    fewest = least_cost(lengths, cap, 1.0, packed=True) - sum(lengths)
    assert len(plan.units) <= fewest + 1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lockstep", [False, True])
def test_ranks_get_equal_work(packed: bool, lockstep: bool) -> None:
    """On log-normal lengths the slowest of 2 to 8 ranks costs at most 8% more than the cheapest cut's mean."""
    draw = random.Random(0)
    for world_size in (2, 3, 8):
        tokens = [min(512, max(1, int(draw.lognormvariate(4.5, 0.8)))) for _ in range(64 * world_size)]
        lengths, budget = SampleLengths(tokens=tokens, packed=packed), token_budget(4096, fixed_tokens=100.0)
        (alone,) = costs_of(plan_by_length(lengths, 1, SplitOptions(), budget), lengths, 100.0)
        dealt = costs_of(plan_by_length(lengths, world_size, SplitOptions(lockstep=lockstep), budget), lengths, 100.0)

        assert max(map(sum, dealt)) <= 1.08 * sum(alone) / world_size


def test_a_fixed_cut_is_the_same_on_any_ranks() -> None:
    """With deal="fixed" the micro-batches are the same on any number of ranks."""
    lengths = SampleLengths(tokens=[place * 7 % 31 + 1 for place in range(90)])
    found = []
    for world_size in (1, 2, 5):
        plan = plan_by_length(lengths, world_size, SplitOptions(deal="fixed"), token_budget(64))
        found.append({tuple(plan.positions(unit)) for unit in plan.units})

    assert found[0] == found[1] == found[2]


def test_a_sample_longer_than_the_budget_is_refused_or_alone() -> None:
    """A sample above the budget raises with its length and the fixes; optionally it gets its own micro-batch."""
    lengths = SampleLengths(tokens=[3, 50, 4])
    with raises(BatchSizeError, "sample_too_long"):
        plan_by_length(lengths, 1, SplitOptions(), token_budget(20))
    plan = plan_by_length(lengths, 1, SplitOptions(), token_budget(20, longer="alone"))

    assert sorted(tuple(plan.positions(unit)) for unit in plan.units) == [(0, 2), (1,)]


def test_other_values_are_checked() -> None:
    """Falling costs, non-numbers and unknown options raise."""
    with raises(UserError, "wrong_kind_of_value"):
        token_budget(8, fixed_tokens=-1)
    with raises(UserError, "unknown_option"):
        token_budget(8, longer="cut")  # type: ignore[arg-type]  # on purpose
    with raises(UserError, "falling_cost"):
        plan_by_length(
            SampleLengths(tokens=[1, 2]), 1, SplitOptions(), token_budget(8, sample_cost=lambda length: -length)
        )


def test_a_batch_without_lengths_is_refused() -> None:
    """The error for data without lengths names the argument to give."""
    with raises(DataError, "no_lengths"):
        Placement(SplitOptions(), 1, 0, token_budget(8)).plan(5)
