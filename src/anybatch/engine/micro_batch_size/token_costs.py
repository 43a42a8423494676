"""What a micro-batch costs beside its tokens, measured on the first batch: the one number cuts by length need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.core.splitting import Cut
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.micro_batch_size.trial_run import TrialRuns

_TIMES = 4  # the first warms up, of the others the shortest counts
_FEWEST_TIMES_TOKENS = 4  # two sizes that are less far apart than this tell nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """The result of a measurement.

    Attributes:
        fixed_tokens: what a micro-batch costs beside its tokens, in tokens.
        words: the same with where it comes from.
    """

    fixed_tokens: float
    words: str


def assumed(reason: str) -> TokenCosts:
    """Return what is taken where nothing can be measured; `reason` is a clause."""
    return TokenCosts(
        fixed_tokens=FIXED_TOKENS, words=f"{FIXED_TOKENS:,.0f} tokens a micro-batch, assumed, as {reason}"
    )


def pieces_to_time(lengths: SampleLengths, budget: TokenBudget) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return where the samples of a small and of a large micro-batch stand; None where a batch has no two such.

    The small one is the shortest sample, the large one the micro-batch of the cut that holds most tokens.
    """
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if not plan.units:
        return None

    def tokens(positions: Sequence[int]) -> int:
        of_samples = [laid_out[place] for place in positions]
        return sum(of_samples) if lengths.packed else len(of_samples) * max(of_samples)

    large = max((plan.positions(unit) for unit in plan.units), key=tokens)
    small = [min(range(len(laid_out)), key=laid_out.__getitem__)]
    if len(large) < 2 or tokens(large) < _FEWEST_TIMES_TOKENS * max(1, tokens(small)):  # noqa: PLR2004 (sizes tell them apart)
        return None
    return small, large


def measured_costs(
    runs: Callable[[Callable[[int, int], Sequence[Batch]], int], TrialRuns],
    load: Callable[[Sequence[int]], Batch],
    pieces: tuple[Sequence[int], Sequence[int]],
    lengths: SampleLengths,
    budget: TokenBudget,
) -> TokenCosts:
    """Time a small and a large micro-batch, and return where the line through both begins.

    Args:
        runs: function (pieces, number of samples) -> what runs them.
        load: function (positions) -> these samples, collated.
        pieces: the positions of both.
        lengths: of the batch's samples.
        budget: what a sample costs.
    """
    laid_out = lengths.laid_out
    seconds: list[float] = []
    tokens: list[float] = []
    for positions in pieces:
        batch = load(positions)
        trial = runs(lambda _size, _most, batch=batch: [copied(batch)], len(positions))  # type: ignore[misc]  # bound now
        times = []
        for _ in range(_TIMES):
            result = trial.run(len(positions), 1)
            if result.outcome != "ran" or not result.seconds:
                return assumed(f"a micro-batch could not be timed ({result.error or result.outcome})")
            times.append(result.seconds[0])
        seconds.append(min(times[1:]))
        of_samples = [budget.cost(laid_out[place]) for place in positions]
        tokens.append(sum(of_samples) if lengths.packed else len(of_samples) * max(of_samples))
    per_token = (seconds[1] - seconds[0]) / (tokens[1] - tokens[0])
    if per_token <= 0:
        return assumed(f"{tokens[0]:,.0f} tokens took as long as {tokens[1]:,.0f}")
    fixed = min(max(0.0, seconds[0] / per_token - tokens[0]), float(budget.tokens))
    words = f"{fixed:,.0f} tokens a micro-batch, measured: {seconds[0] * 1e3:.3g} ms for {tokens[0]:,.0f} tokens, "
    return TokenCosts(fixed_tokens=fixed, words=f"{words}{seconds[1] * 1e3:.3g} ms for {tokens[1]:,.0f}")
