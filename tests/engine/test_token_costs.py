"""What a micro-batch costs beside its tokens, and the cap under which a step takes least, from times that are known."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import anybatch as ab
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths
from anybatch.engine.micro_batch_size.cut_choice import Way, best_cap, caps_to_time, seconds_of_steps, units_by_way
from anybatch.engine.micro_batch_size.token_costs import TokenCosts, measured_costs, pieces_to_time
from anybatch.engine.micro_batch_size.trial_run import TrialResult
from tests.faults import sees

LENGTHS = SampleLengths(tokens=[10, 12, 14, 20, 40] * 4 + [500] * 8)
BUDGET = ab.token_budget(4_096)


class Timed:
    """In the place of trial runs: times of micro-batches by a formula."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def run(self, size: int, most: int) -> TrialResult:
        """Return the time."""
        del size, most
        return TrialResult("ran", (self._seconds,))


def costs(seconds: Callable[[int], float], lengths: SampleLengths = LENGTHS) -> TokenCosts:
    """Return what is measured where a micro-batch of so many padded tokens takes so long."""
    pieces = pieces_to_time(lengths, BUDGET)
    assert pieces is not None
    return measured_costs(timed(seconds, lengths), list, pieces, lengths, BUDGET)


def timed(seconds: Callable[[int], float], lengths: SampleLengths) -> Any:
    """Return what runs micro-batches that take so long."""

    def runs(make: Callable[[int, int], Sequence[Any]], num_samples: int) -> Any:
        (positions,) = make(num_samples, 1)
        assert len(positions) == num_samples
        return Timed(seconds(len(positions) * max(lengths.tokens[place] for place in positions)))

    return runs


def cap_of(seconds: Callable[[int], float]) -> int:
    """Return the cap that is taken where a micro-batch of so many padded tokens takes so long."""
    units = units_by_way({False: LENGTHS}, {False: costs(seconds)}, BUDGET)
    found, failed = seconds_of_steps(timed(seconds, LENGTHS), dict.fromkeys(units, list), units)
    assert not failed
    best = best_cap(found, packed=False)
    assert best is not None
    return best.cap


@sees(
    "the line goes through the smallest and the largest micro-batch",
    "src/anybatch/engine/micro_batch_size/token_costs.py",
    "several if tokens(several) >= least else large",
    "large",
)
def test_the_fixed_cost_is_that_of_small_micro_batches() -> None:
    """A micro-batch costs 36 tokens beside its own, also where tokens of large ones take half as long again."""
    linear = costs(lambda tokens: 0.001 * (36 + tokens))
    assert linear.fixed_tokens == pytest.approx(36)
    assert cap_of(lambda tokens: 0.001 * (36 + tokens)) == BUDGET.tokens
    dear = costs(lambda tokens: 0.001 * (36 + tokens * (1.5 if tokens > 3_000 else 1.0)))
    assert dear.fixed_tokens == pytest.approx(36)


@sees(
    "the fastest cap is taken however little it saves",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "_WORTH_A_SMALLER_CAP = 0.98",
    "_WORTH_A_SMALLER_CAP = 1.0",
)
@sees(
    "the smallest cap that is good is taken",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "return max(good,",
    "return min(good,",
)
def test_smaller_micro_batches_are_made_where_their_tokens_are_cheaper() -> None:
    """Cut at half of the budget where whole ones take half as long again for a token, and not for three percent."""
    assert cap_of(lambda tokens: 0.001 * (36 + tokens * (1.5 if tokens > 3_000 else 1.0))) == 2_048
    assert cap_of(lambda tokens: 0.001 * (36 + tokens * (1.03 if tokens > 3_000 else 1.0))) == BUDGET.tokens


@sees(
    "parts of a budget are timed that hold the whole batch",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "if longest <= cap < largest]",
    "if longest <= cap]",
)
@sees(
    "caps are timed that hold no long sample",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "if longest <= cap < largest]",
    "if cap < largest]",
)
def test_caps_to_time_are_less_than_what_the_batch_has() -> None:
    """A budget is halved to less than its largest micro-batch, however large it is, and down to the longest sample."""
    budget = ab.token_budget(65_536)  # padded as it is cut with 256 tokens a micro-batch, the largest one has 4,000
    assert caps_to_time(LENGTHS, budget) == [65_536, 2_048, 1_024, 512]
    assert caps_to_time(LENGTHS, BUDGET) == [4_096, 2_048, 1_024, 512]
    assert caps_to_time(SampleLengths(tokens=[300, 3_000]), BUDGET) == [4_096]
    for tokens in ([], [0, 0], [1], [0, 1]):
        assert caps_to_time(SampleLengths(tokens=tokens, packed=True), BUDGET) == [4_096]


def test_few_shapes_are_not_cut_smaller() -> None:
    """A smaller cap could leave a sample without a shape."""
    lengths = SampleLengths(tokens=LENGTHS.tokens, shapes=((64, 64), (8, 512)))
    ways = units_by_way({False: lengths}, {False: TokenCosts(fixed_tokens=36.0, words="")}, BUDGET)
    assert list(ways) == [Way(packed=False, cap=BUDGET.tokens)]


def test_times_that_tell_nothing_are_not_taken() -> None:
    """Where more tokens take no longer, what is assumed elsewhere is assumed, and the reason is told."""
    found = costs(lambda _: 0.01)
    assert found.fixed_tokens == FIXED_TOKENS
    assert "took as long as" in found.words
