"""The fixed cost of a micro-batch in tokens, and the cap with the fastest step, from given times."""

from collections.abc import Callable
from typing import Any

import pytest

import anybatch as ab
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths
from anybatch.engine.micro_batch_size.budget_trials import (
    TokenCosts,
    Way,
    best_cap,
    measured_costs,
    seconds_of_steps,
    units_by_cap,
)
from anybatch.engine.micro_batch_size.search import TrialResult

LENGTHS = SampleLengths(tokens=[10, 12, 14, 20, 40] * 4 + [500] * 8)
BUDGET = ab.token_budget(4_096)


class Timed:
    """Replaces trial runs by a formula for the time of a micro-batch."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def run(self, size: int, most: int) -> TrialResult:
        """Return the time."""
        del size, most
        return TrialResult("ran", (self._seconds,))


def costs(seconds: Callable[[int], float], lengths: SampleLengths = LENGTHS) -> TokenCosts:
    """Return the measured costs for a given time per micro-batch, by padded tokens."""
    return measured_costs(timed(seconds, lengths), list, lengths, BUDGET)


def timed(seconds: Callable[[int], float], lengths: SampleLengths) -> Any:
    """Return a function that simulates micro-batches with a given time."""

    def runs(positions: Any, num_samples: int) -> Any:
        assert len(positions) == num_samples
        return Timed(seconds(len(positions) * max(lengths.tokens[place] for place in positions)))

    return runs


def cap_of(seconds: Callable[[int], float]) -> int:
    """Return the chosen cap for a given time per micro-batch, by padded tokens."""
    units = units_by_cap(LENGTHS, costs(seconds), BUDGET)
    found, failed = seconds_of_steps(timed(seconds, LENGTHS), dict.fromkeys(units, list), units)
    assert not failed
    best = best_cap(found, packed=False)
    assert best is not None
    return best.cap


def test_the_fixed_cost_is_that_of_small_micro_batches() -> None:
    """The fixed cost of 36 tokens is measured right, even if tokens of large micro-batches take 50% longer."""
    linear = costs(lambda tokens: 0.001 * (36 + tokens))
    assert linear.fixed_tokens == pytest.approx(36)
    assert cap_of(lambda tokens: 0.001 * (36 + tokens)) == BUDGET.tokens
    dear = costs(lambda tokens: 0.001 * (36 + tokens * (1.5 if tokens > 3_000 else 1.0)))
    assert dear.fixed_tokens == pytest.approx(36)


def test_smaller_micro_batches_are_made_where_their_tokens_are_cheaper() -> None:
    """The cap is half the budget if tokens of large micro-batches take 50% longer, but not if they take 3% longer."""
    assert cap_of(lambda tokens: 0.001 * (36 + tokens * (1.5 if tokens > 3_000 else 1.0))) == 2_048
    assert cap_of(lambda tokens: 0.001 * (36 + tokens * (1.03 if tokens > 3_000 else 1.0))) == BUDGET.tokens


def test_few_shapes_are_not_cut_smaller() -> None:
    """Batches with fixed shapes get no smaller cap, which could leave a sample without a shape."""
    lengths = SampleLengths(tokens=LENGTHS.tokens, shapes=((64, 64), (8, 512)))
    ways = units_by_cap(lengths, TokenCosts(fixed_tokens=36.0, words=""), BUDGET)
    assert list(ways) == [Way(packed=False, cap=BUDGET.tokens)]


def test_times_that_tell_nothing_are_not_taken() -> None:
    """If more tokens take no longer, the default cost is used and the reason is reported."""
    found = costs(lambda _: 0.01)
    assert found.fixed_tokens == FIXED_TOKENS
    assert "took as long as" in found.words
