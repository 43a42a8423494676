"""Arithmetic of loss declarations, without engine, model or ranks: sums, divided once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.core.loss import Loss, LossSum, TermFactors, declared, factors_of, returned_count, scaled, unit_counts
from anybatch.errors import LossError
from tests.faults import sees
from tests.raising import raises

ITEMS = st.lists(st.floats(-10, 10), min_size=0, max_size=6)
UNITS = st.lists(ITEMS, min_size=1, max_size=6).filter(any)
WEIGHTS = st.sampled_from([1.0, 0.01, -2.0])


def never_called(model: Any, batch: Any) -> None:
    """Stand in for a loss function: these tests pass its result directly."""
    raise AssertionError(model, batch)


def total_of(loss: Loss, outputs: list[Any], counts: list[tuple[float, ...]]) -> float:
    """Return the sum of the micro-batches' contributions."""
    divisors = [sum(column) for column in zip(*counts, strict=True)]
    terms = [
        term
        for output, count in zip(outputs, counts, strict=True)
        for term in scaled(loss, output, factors_of(loss, count, divisors, 1.0))
    ]
    return float(torch.stack(terms).sum())


def mean(values: list[float]) -> float:
    """Return the plain mean."""
    return sum(values) / len(values)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda items: items.mean(),
    "one per item": lambda items: items,
    "sum": lambda items: LossSum(items.sum(), len(items)),
    "sum, counted on the device": lambda items: LossSum(items.sum(), torch.tensor(len(items))),
}


@pytest.mark.parametrize("form", FORMS)
@given(units=UNITS)
@pytest.mark.slow
def test_parts_add_up_to_the_whole_mean(form: str, units: list[list[float]]) -> None:
    """For any distribution of items over micro-batches, even empty ones, the parts add up to the mean of all items."""
    loss = ab.mean_over_samples(never_called)
    outputs = [FORMS[form](torch.tensor(unit, dtype=torch.float64)) for unit in units]
    counts = [unit_counts(loss, None, len(unit)) for unit in units]

    expected = mean([item for unit in units for item in unit])
    assert total_of(loss, outputs, counts) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@sees(
    "the second term is divided by the first one's count",
    "src/anybatch/core/loss.py",
    "counts, divisors, strict=True)",
    "counts, [divisors[0]] * len(divisors), strict=True)",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[1-rank-two terms]"],
)
@given(units=st.lists(st.tuples(ITEMS, ITEMS), min_size=1, max_size=5), weight=WEIGHTS)
@pytest.mark.slow
def test_every_term_has_its_own_divisor(units: list[tuple[list[float], list[float]]], weight: float) -> None:
    """Each of two terms is a mean over its own items, and a term without items adds nothing."""
    loss = ab.sum_of(
        never_called,
        one=ab.counted(lambda batch: len(batch[0])),
        other=ab.counted(lambda batch: len(batch[1]), weight=weight),
    )
    counts = [unit_counts(loss, unit, 1) for unit in units]
    wide = [[torch.tensor(items, dtype=torch.float64) for items in unit] for unit in units]
    outputs = [{"one": one.mean(), "other": other.mean()} for one, other in wide]
    all_items = [[item for unit in units for item in unit[number]] for number in (0, 1)]
    if not any(all_items):
        return
    means = [mean(items) if items else 0.0 for items in all_items]

    assert loss.weights == {"one": 1.0, "other": weight}
    expected = means[0] + weight * means[1]
    assert total_of(loss, outputs, counts) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@sees(
    "a mean over no items is not skipped",
    "src/anybatch/core/loss.py",
    "factors[0])] if factors[0].has_value else []",
    "factors[0])]",
)
def test_a_mean_over_no_items_is_skipped() -> None:
    """The NaN mean of a micro-batch without items is left out, as 0 times NaN would be NaN."""
    loss = ab.mean_over(never_called, count=lambda batch: batch)
    nothing = torch.zeros(0, requires_grad=True)
    (share,) = factors_of(loss, (0.0,), (4.0,), 1.0)

    assert bool(torch.isnan(nothing.mean() * 0.0))
    assert scaled(loss, nothing.mean(), [share]) == []


def test_a_unit_of_weight_zero_adds_zero() -> None:
    """A unit of weight 0, which only keeps ranks in lockstep, contributes exactly 0 with gradient 0."""
    loss = ab.mean_over_samples(never_called)
    weight = torch.ones(3, requires_grad=True)
    (term,) = scaled(loss, weight.mean(), factors_of(loss, (3.0,), (10.0,), 0.0))
    term.backward()

    assert float(term.detach()) == 0.0
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]


@sees(
    "masked tokens are counted",
    "src/anybatch/core/loss.py",
    "return torch.as_tensor(targets != ignore_index).sum()",
    "return (targets == targets).sum()",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[1-rank-masked tokens]"],
)
@sees(
    "the first position counts as a target of a causal model",
    "src/anybatch/core/loss.py",
    """
        if shift:
""",
    """
        if False:
""",
    also=["tests/engine/test_exactness.py::test_gradient_equals_the_unsplit_batch[1-rank-masked tokens]"],
)
@given(
    labels=st.lists(st.lists(st.sampled_from([-100, 0, 1, 7]), min_size=5, max_size=5), min_size=1, max_size=4),
    ignored=st.sampled_from([-100, 7]),
)
def test_token_counts_match_the_loss(labels: list[list[int]], ignored: int) -> None:
    """The count is the number of unmasked targets; for a causal model the first position is not a target."""
    batch = {"labels": torch.tensor(labels)}
    shifted = ab.mean_over_tokens(never_called, ignore_index=ignored)
    unshifted = ab.mean_over_tokens(never_called, ignore_index=ignored, shift=False)

    assert unit_counts(unshifted, batch, 99) == (sum(label != ignored for row in labels for label in row),)
    assert unit_counts(shifted, batch, 99) == (sum(label != ignored for row in labels for label in row[1:]),)


def test_an_undeclared_loss_has_its_count() -> None:
    """Losses per item count their elements, a LossSum has its count; both are first divided by a guess."""
    loss = declared(never_called)
    items = torch.arange(6.0).reshape(2, 3)
    share = factors_of(loss, unit_counts(loss, None, 4), (8.0,), 1.0)

    assert share == (TermFactors(0.5, 0.125, 4.0),)
    assert float(scaled(loss, items, share)[0]) == 15 / 8
    assert returned_count(items) == 6
    assert returned_count(LossSum(items.sum(), 5)) == 5


@pytest.mark.parametrize("count", [-1, float("inf"), float("nan")])
def test_impossible_counts_are_refused(count: float) -> None:
    """A count that is negative, infinite or NaN raises with its value."""
    with raises(LossError, "bad_count"):
        unit_counts(ab.mean_over(never_called, count=lambda _: count), None, 1)


@pytest.mark.parametrize(
    ("declare", "values", "fits"),
    [
        (ab.samples(), 4, True),
        (ab.samples(), 3, False),
        (ab.samples(), 8, False),
        (ab.tokens(), 4, True),
        (ab.tokens(), 3, False),
        (ab.tokens(), 8, True),
        (ab.counted(lambda _: 4), 3, True),
        (ab.counted(lambda _: 4), 8, True),
    ],
)
def test_losses_per_item_match_the_declaration(declare: Any, values: int, fits: bool) -> None:
    """Losses per sample must match the number of samples; per target there may be more, for masked ones."""
    loss = ab.sum_of(never_called, term=declare)
    shares = factors_of(loss, (4.0,), (8.0,), 1.0)
    output = {"term": torch.ones(values)}
    if fits:
        assert float(scaled(loss, output, shares)[0]) == values / 8
        return
    with raises(LossError, "other_items"):
        scaled(loss, output, shares)
