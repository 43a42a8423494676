"""A batch whose samples are cut in another order than its own: nothing lost, nothing twice, and the same gradient."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.splitting import Cut, plan_batch
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.errors import BatchSizeError, CompositionError
from anybatch.norms import Ghost
from anybatch.testing import relative_error
from tests.engine.cases import CASES, InMemory, plain_gradients

TOLERANCE = 1e-12
LENGTHS = (5, 1, 4, 1, 3, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3)


def by_length(sample_ids: Sequence[int]) -> list[int]:
    """Return positions with the shortest sample first, as a cut by length would."""
    return sorted(range(len(sample_ids)), key=lambda position: LENGTHS[sample_ids[position] % len(LENGTHS)])


@given(
    num_samples=st.integers(0, 60),
    world_size=st.integers(1, 4),
    size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_positions_of_units_are_a_partition(num_samples: int, world_size: int, size: int, seed: int) -> None:
    """Whatever the permutation, each position of the batch is in exactly one unit that counts, in the order's order."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    plan = plan_batch(num_samples, world_size, Cut(micro_batch_size=size)).in_order(order)

    found = [position for unit in plan.units for position in plan.positions(unit)]

    assert found == order


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 3)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    """A position that is missing, there twice, or beyond the batch would lose a sample or count it twice."""
    with pytest.raises(BatchSizeError, match="each position from 0 to 2 once"):
        plan_batch(3, 1, Cut()).in_order(order)


def test_a_data_set_is_fed_in_the_order_of_the_plan() -> None:
    """Units hold like lengths beside like; ids, and so random keys, go with their samples."""
    cut = Cut(micro_batch_size=4, order=by_length)
    batches = ab.batches(range(50), effective_batch_size=20, shuffle=True, seed=3, collate=list)
    for batch in batches:
        plan = Placement(cut, 1, 0).plan(batch.sample_ids)
        fed = [sample for unit in Placement(cut, 1, 0).micro_batches(batch) for sample in unit]
        lengths = [LENGTHS[sample % len(LENGTHS)] for sample in fed]
        assert lengths == sorted(lengths)
        assert sorted(fed) == sorted(batch.sample_ids)
        assert plan.order is not None
        assert fed == [batch.sample_ids[position] for position in plan.order]


@pytest.mark.parametrize("case", ["ragged", "masked tokens", "two terms"])
def test_the_gradient_does_not_depend_on_the_order(case: str) -> None:
    """The engine under an order gives the gradient of the un-split batch."""
    model, batch = CASES[case].model(), CASES[case].batch()
    expected = plain_gradients(model, CASES[case].reference(model, batch))
    with engine_of(model, CASES[case].loss, by_length) as engine:
        found = engine.gradients(InMemory(batch))

    assert relative_error(found, expected) <= TOLERANCE


def test_a_loss_across_samples_sees_the_batch_in_its_own_order() -> None:
    """Outputs come back in the batch's order, so that labels by position, as in a contrastive loss, stay right."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4).double()
    batch = {"x": torch.randn(11, 3, dtype=torch.float64)}

    def encode(net: Any, part: Any) -> torch.Tensor:
        outputs: torch.Tensor = net(part["x"])
        return outputs

    def neighbours(_: Any, outputs: torch.Tensor) -> torch.Tensor:
        return (outputs[1:] * outputs[:-1]).sum().sigmoid()

    expected = plain_gradients(model, neighbours(model, encode(model, batch)))
    with engine_of(model, ab.joint(encode, neighbours), by_length) as engine:
        assert relative_error(engine.gradients(InMemory(batch)), expected) <= TOLERANCE


def test_groups_of_consecutive_samples_and_an_order_are_refused() -> None:
    """Ghost groups would hold other samples than without the order."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with pytest.raises(CompositionError, match=r"Ghost\(group_size=2\)"):
        engine_of(model, ab.mean_over_samples(lambda net, part: net(part["x"]).mean()), by_length, norms=Ghost(2))


def engine_of(model: torch.nn.Module, loss: Any, order: Any, **spec: Any) -> ab.Engine:
    """Return an engine that cuts batches in an order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.Engine.from_spec(
        TrainSpec(model=model, optimizer=optimizer, loss=loss, check_loss=False, **spec),
        Hardware(micro_batch_size=4, order=order),
    )
