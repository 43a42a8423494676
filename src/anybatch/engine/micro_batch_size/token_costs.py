"""What a micro-batch costs beside its tokens, measured on the first batch."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.core.splitting import Cut
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.micro_batch_size.trial_run import TrialRuns

_TIMES = 4  # the first warms up, of the others the shortest counts
_FEWEST_TIMES_TOKENS = 4  # two sizes that are less far apart than this tell nothing
_SEVERAL = 8  # a part of the budget: small enough for a token to cost what it costs beside few others

Runs = Callable[[Callable[[int, int], Sequence[Batch]], int], TrialRuns]
"""From pieces, function (size, most) -> micro-batches, and their number of samples to what runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """The result of a measurement.

    Attributes:
        fixed_tokens: what a micro-batch costs beside its tokens, in tokens.
        cut_at: most tokens of a micro-batch, the budget's or fewer; None: that has not been chosen.
        words: what a micro-batch costs, with where it comes from.
    """

    fixed_tokens: float
    cut_at: int | None = None
    words: str

    def settled(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget with them."""
        return dataclasses.replace(budget, fixed_tokens=self.fixed_tokens, cut_at=self.cut_at)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Positions in the effective batch of two micro-batches to time.

    Attributes:
        small: the shortest sample.
        larger: so many of the shortest ones that they hold about an eighth of the tokens of the largest micro-batch of
            the cut; or that one, where these are too few to tell both apart.
    """

    small: Sequence[int]
    larger: Sequence[int]


def assumed(reason: str) -> TokenCosts:
    """Return what is taken where nothing can be measured; `reason` is a clause."""
    return TokenCosts(
        fixed_tokens=FIXED_TOKENS, words=f"{FIXED_TOKENS:,.0f} tokens a micro-batch, assumed, as {reason}"
    )


def pieces_to_time(lengths: SampleLengths, budget: TokenBudget) -> Pieces | None:
    """Return micro-batches to time; None where a batch has no two that differ enough in size."""
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if not plan.units:
        return None

    def tokens(positions: Sequence[int]) -> float:
        return tokens_of([laid_out[place] for place in positions], lengths)

    large = max((plan.positions(unit) for unit in plan.units), key=tokens)
    shortest = sorted(range(len(laid_out)), key=laid_out.__getitem__)
    small = shortest[:1]
    least = _FEWEST_TIMES_TOKENS * max(1, tokens(small))
    if len(large) < 2 or tokens(large) < least:  # noqa: PLR2004 (sizes tell them apart)
        return None
    num_several = next(n for n in range(1, len(shortest) + 1) if tokens(shortest[:n]) * _SEVERAL >= tokens(large))
    several = shortest[:num_several]
    return Pieces(small, several if tokens(several) >= least else large)


def measured_costs(
    runs: Runs,
    load: Callable[[Sequence[int]], Batch],
    pieces: Pieces,
    lengths: SampleLengths,
    budget: TokenBudget,
) -> TokenCosts:
    """Time two small micro-batches, and return where the line through them begins.

    Small ones, since it decides which of these are joined; in a large one, whose activations leave the processor's
    caches, a token may take longer.

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
    for positions in (pieces.small, pieces.larger):
        batch = load(positions)
        trial = runs(lambda _size, _most, batch=batch: [copied(batch)], len(positions))  # type: ignore[misc]  # bound now
        times = []
        for _ in range(_TIMES):
            result = trial.run(len(positions), 1)
            if result.outcome != "ran" or not result.seconds:
                return assumed(f"a micro-batch could not be timed ({result.error or result.outcome})")
            times.append(result.seconds[0])
        seconds.append(min(times[1:]))
        tokens.append(tokens_of([budget.cost(laid_out[place]) for place in positions], lengths))
    longer, more = seconds[1] - seconds[0], tokens[1] - tokens[0]
    if longer <= 0 or more <= 0:
        return assumed(f"{tokens[0]:,.0f} tokens took as long as {tokens[1]:,.0f}")
    fixed = min(max(0.0, seconds[0] * more / longer - tokens[0]), float(budget.tokens))
    words = f"{fixed:,.0f} tokens a micro-batch, measured: {seconds[0] * 1e3:.3g} ms for {tokens[0]:,.0f} tokens, "
    return TokenCosts(fixed_tokens=fixed, words=f"{words}{seconds[1] * 1e3:.3g} ms for {tokens[1]:,.0f}")


def tokens_of(of_samples: Sequence[float], lengths: SampleLengths) -> float:
    """Return what samples hold, or cost, in one micro-batch."""
    return sum(of_samples) if lengths.packed else len(of_samples) * max(of_samples)
