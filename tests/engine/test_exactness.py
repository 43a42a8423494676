"""The promise: the gradient of the un-split batch, however it is cut, on any number of ranks."""

import traceback
from collections.abc import Sequence

import pytest
import torch

import anybatch as ab
from anybatch.testing import relative_error
from tests.engine.cases import (
    CASES,
    SPLITS,
    STRATEGIES,
    arrive,
    combinations,
    engine_for,
    naive_gradients,
    plain_gradients,
    sentences,
)
from tests.ranks_fixture import Ranks, selected

TOLERANCE = 1e-12
Errors = dict[tuple[str, str, str], float | str]


def gradient_errors(cases: Sequence[str]) -> Errors:
    """Run on every rank: return the relative error of each (case, split, strategy), or how it failed."""
    world = ab.World.from_environment()
    errors: Errors = {}
    for case_name in cases:
        case = CASES[case_name]
        model, batch = case.model(), case.batch()
        expected = plain_gradients(model, case.reference(model, batch))
        for split, strategy in combinations(world.size):
            try:
                with engine_for(case, SPLITS[split], STRATEGIES[strategy](), world) as engine:
                    found = engine.gradients(arrive(batch, SPLITS[split], world))
                errors[case_name, split, strategy] = relative_error(found, expected)
            except Exception:  # noqa: BLE001 (told by the test that looks at this combination)
                errors[case_name, split, strategy] = traceback.format_exc()
    return errors


def naive_errors(cases: Sequence[str], micro_batch_sizes: Sequence[int | None]) -> dict[str, list[float]]:
    """Run on every rank: return the relative errors of the hand-written loop, case by case."""
    world = ab.World.from_environment()
    errors = {}
    for case_name in cases:
        case = CASES[case_name]
        model = case.model()
        expected = plain_gradients(model, case.reference(model, case.batch()))
        errors[case_name] = [relative_error(naive_gradients(case, world, size), expected) for size in micro_batch_sizes]
    return errors


@pytest.fixture(scope="module")
def errors(ranks: Ranks, request: pytest.FixtureRequest) -> list[Errors]:
    """Return the errors of all combinations, as every rank found them."""
    found: list[Errors] = ranks.run(gradient_errors, selected(request, "case"))
    return found


@pytest.mark.parametrize("case", CASES)
def test_gradient_is_that_of_the_unsplit_batch(case: str, errors: list[Errors]) -> None:
    """On every rank, for every cut and strategy, the gradient is that of one backward over the whole batch.

    Unused parameters included: there a gradient of None must stay None.
    """
    found = [item for rank in errors for item in rank.items() if item[0][0] == case]
    wrong = [f"{key[1:]}: {error}" for key, error in found if isinstance(error, str) or not error <= TOLERANCE]

    assert len(found) == len(errors) * len(combinations(len(errors)))
    assert not wrong, f"{len(wrong)} of {len(found)} combinations:\n" + "\n".join(wrong)


def test_plain_loop_is_right_where_all_sizes_are_equal(one_rank: Ranks, two_ranks: Ranks) -> None:
    """Dividing by the number of micro-batches is right too where nothing is uneven: the yardstick is fair."""
    for pool in (one_rank, two_ranks):
        found = pool.run(naive_errors, ["even"], [3, 7, None])[0]["even"]
        assert max(found) <= TOLERANCE


@pytest.mark.parametrize(
    "case", ["ragged", "masked tokens", "class weights", "two terms", "micro-batches whose mean is NaN"]
)
def test_plain_loop_is_wrong_elsewhere(case: str, two_ranks: Ranks) -> None:
    """The counter-example: on uneven work dividing by the number of micro-batches is off by far more than rounding."""
    found = two_ranks.run(naive_errors, [case], [3])[0][case]
    assert not found[0] < 1e-3  # also true of NaN


def test_sentences_are_as_described() -> None:
    """The masked batch of the cases has 46% masked targets, and lengths with a long tail."""
    labels = sentences()["labels"]
    lengths = (labels != -100).sum(1).double()

    assert 0.455 < float((labels == -100).double().mean()) < 0.465
    assert lengths.max() > lengths.median() * 1.8
    assert lengths.mean() > lengths.median()
    assert torch.equal(labels, sentences()["labels"])
