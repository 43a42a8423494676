"""The fixed cost of a micro-batch, measured on the first batch."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anybatch.core.splitting import Cut
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch
from anybatch.engine.micro_batch_size.trial_run import TrialRuns

_TIMES = 4  # the first warms up, and the shortest of the others counts
_FEWEST_TIMES_TOKENS = 4  # minimum ratio of two sizes to be compared
_SEVERAL = 8  # divisor of the largest micro-batch: small enough for a token to cost the same as among few tokens

Load = Callable[[Sequence[int]], Batch]
"""Function (positions in the effective batch) -> their samples, collated."""
Runs = Callable[[Batch, int], TrialRuns]
"""Function (micro-batch, its number of samples) -> its trial runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCosts:
    """The cost of a micro-batch."""

    fixed_tokens: float
    cut_at: int | None = None
    words: str

    def settled(self, budget: TokenBudget) -> TokenBudget:
        """Return the budget with this cost and cap."""
        return dataclasses.replace(budget, fixed_tokens=self.fixed_tokens, cut_at=self.cut_at)


def assumed(reason: str) -> TokenCosts:
    """Return the default cost, if nothing can be measured; `reason` is a clause."""
    return TokenCosts(
        fixed_tokens=FIXED_TOKENS, words=f"{FIXED_TOKENS:,.0f} tokens per micro-batch, assumed, because {reason}"
    )


def measured_costs(runs: Runs, load: Load, lengths: SampleLengths, budget: TokenBudget) -> TokenCosts:
    """Time two small micro-batches, and return the intercept of the line through both times.

    The fixed cost decides whether small micro-batches are joined, so small ones are timed. In a large one, whose
    activations exceed the processor's caches, a token may take longer.
    """
    pieces = micro_batches_to_time(lengths, budget)
    if pieces is None:
        return assumed("the batch has no two micro-batches of clearly different sizes")
    seconds: list[float] = []
    tokens: list[float] = []
    for positions in pieces:
        trial = runs(load(positions), len(positions))
        times = []
        for _ in range(_TIMES):
            result = trial.run(len(positions), 1)
            if result.outcome != "ran" or not result.seconds:
                return assumed(f"a micro-batch could not be timed ({result.error or result.outcome})")
            times.append(result.seconds[0])
        seconds.append(min(times[1:]))
        tokens.append(tokens_of([budget.cost(lengths.laid_out[place]) for place in positions], lengths))
    longer, more = seconds[1] - seconds[0], tokens[1] - tokens[0]
    if longer <= 0 or more <= 0:
        return assumed(f"{tokens[0]:,.0f} tokens took as long as {tokens[1]:,.0f}")
    fixed = min(max(0.0, seconds[0] * more / longer - tokens[0]), float(budget.tokens))
    words = f"{fixed:,.0f} tokens per micro-batch, measured: {seconds[0] * 1e3:.3g} ms for {tokens[0]:,.0f} tokens, "
    return TokenCosts(fixed_tokens=fixed, words=f"{words}{seconds[1] * 1e3:.3g} ms for {tokens[1]:,.0f}")


def micro_batches_to_time(lengths: SampleLengths, budget: TokenBudget) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return positions of two micro-batches to time; None if no two differ enough in size.

    The first is the shortest sample. The second is the shortest samples that together have about an eighth of the
    tokens of the largest micro-batch of the cut; or that largest micro-batch, if they are too few for a comparison.
    """
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if not plan.units:
        return None

    def tokens(positions: Sequence[int]) -> float:
        return tokens_of([laid_out[place] for place in positions], lengths)

    large = max((plan.positions(unit) for unit in plan.units), key=tokens)
    shortest = sorted(range(len(laid_out)), key=laid_out.__getitem__)
    least = _FEWEST_TIMES_TOKENS * max(1, tokens(shortest[:1]))
    if len(large) < 2 or tokens(large) < least:  # noqa: PLR2004 (more than one sample)
        return None
    num_several = next(n for n in range(1, len(shortest) + 1) if tokens(shortest[:n]) * _SEVERAL >= tokens(large))
    several = shortest[:num_several]
    return shortest[:1], several if tokens(several) >= least else large


def tokens_of(of_samples: Sequence[float], lengths: SampleLengths) -> float:
    """Return the tokens, or the cost, of samples as one micro-batch."""
    return sum(of_samples) if lengths.packed else len(of_samples) * max(of_samples)
