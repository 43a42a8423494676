"""The promise: the gradient equals the unsplit batch's, for any cut and number of ranks."""

import traceback
from collections.abc import Sequence

import pytest

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
)
from tests.faults import sees
from tests.ranks_fixture import Ranks, selected

TOLERANCE = 1e-12
Errors = dict[tuple[str, str, str], float | str]


def gradient_errors(cases: Sequence[str]) -> Errors:
    """Run on every rank: return the relative error, or the traceback, of each (case, split, strategy)."""
    world = ab.World.from_environment()
    errors: Errors = {}
    for case_name in cases:
        case = CASES[case_name]
        model, batch = case.model(), case.batch()
        expected = plain_gradients(model, case.reference(model, batch))
        for split, strategy in combinations(world.size):
            try:
                with engine_for(case, SPLITS[split], STRATEGIES[strategy](), world, check_loss=False) as engine:
                    found = engine.gradients(arrive(batch, SPLITS[split], world))
                errors[case_name, split, strategy] = relative_error(found, expected)
            except Exception:  # noqa: BLE001 (the test of this combination reports it)
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
    """Return the errors of all combinations, rank by rank."""
    found: list[Errors] = ranks.run(gradient_errors, selected(request, "case"))
    return found


@sees(
    "mean of means: every micro-batch is divided by its own count and their number",
    "src/anybatch/engine/micro_batches.py",
    "factors_of(loss, counts[number], divisors, unit.weight, sums)",
    "factors_of(loss, counts[number], [len(running) * count for count in counts[number]], unit.weight, sums)",
    cases=["1-rank-ragged", "1-rank-masked tokens"],
    also=[
        "tests/engine/test_steps.py::test_a_run_equals_the_plain_run[1-rank]",
        "tests/examples/test_ladder_against_engine.py::test_spirals[3-arguments2]",
        "tests/examples/test_ladder_against_engine.py::test_token_mean",
    ],
)
@sees(
    "a term without items is added: NaN x 0",
    "src/anybatch/core/loss.py",
    """
        for name, factor in zip(loss.names, factors, strict=True)
        if factor.has_value
""",
    """
        for name, factor in zip(loss.names, factors, strict=True)
""",
    cases=["1-rank-two terms, some without targets"],
)
@sees(
    "a sum is divided like a mean",
    "src/anybatch/core/loss.py",
    "of_sum = of_mean = unit_weight * term.weight",
    "of_sum = of_mean = unit_weight * term.weight / divisor",
    cases=["1-rank-a sum"],
)
@sees(
    "a sum is weighted by its samples",
    "src/anybatch/core/loss.py",
    "of_sum = of_mean = unit_weight * term.weight",
    "of_mean = (of_sum := unit_weight * term.weight) * count",
    cases=["1-rank-a sum"],
)
@sees(
    "a count from the forward is not divided by",
    "src/anybatch/engine/step.py",
    "torch.reciprocal(count, out=self._factor).mul_(self._guess)",
    "self._factor.fill_(1.0)",
    cases=["1-rank-loss sum, undeclared", "1-rank-one loss per target, undeclared"],
)
@sees(
    "counts of the other ranks are ignored",
    "src/anybatch/engine/micro_batches.py",
    "divisors = tuple(sum(column) for column in zip(*rows, strict=True))[:-2]",
    "divisors = tuple(number or 1.0 for number in own)",
    cases=["2-ranks-masked tokens"],
)
@sees(
    "DDP's average is not undone",
    "src/anybatch/parallel/ddp.py",
    "return flat if sent is flat",
    "return flat / dist.get_world_size() if sent is flat",
    cases=["2-ranks-even"],
)
@sees(
    "reduction starts in the first micro-batch",
    "src/anybatch/parallel/all_reduce.py",
    "if turn.last and self._overlap:",
    "if turn.first and self._overlap:",
    cases=["2-ranks-ragged"],
)
@sees(
    "a rank without micro-batches does not join DDP's reduction",
    "src/anybatch/parallel/ddp.py",
    """
        if not self._reduced:
            self._join_with_zeros()
""",
    "",
    cases=["2-ranks-last ranks without targets"],
)
@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_the_unsplit_batch(case: str, errors: list[Errors]) -> None:
    """On every rank, for every cut and strategy, the gradient equals one backward over the whole batch.

    Gradients of unused parameters stay None.
    """
    found = [item for rank in errors for item in rank.items() if item[0][0] == case]
    wrong = [f"{key[1:]}: {error}" for key, error in found if isinstance(error, str) or not error <= TOLERANCE]

    assert len(found) == len(errors) * len(combinations(len(errors)))
    assert not wrong, f"{len(wrong)} of {len(found)} combinations:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "case", ["ragged", "masked tokens", "class weights", "two terms", "micro-batches whose mean is NaN"]
)
def test_plain_loop_is_wrong_on_uneven_work(case: str, two_ranks: Ranks) -> None:
    """The counter-example: on uneven work, dividing by the number of micro-batches is off by far more than rounding."""
    found = two_ranks.run(naive_errors, [case], [3])[0][case]
    assert not found[0] < 1e-3  # also true of NaN
