"""Trial runs under a token budget on the first batch: the fastest cap on a micro-batch's tokens, and padded or packed.

Full steps are timed, since a cost per token does not predict them: a token takes longer in a micro-batch whose
activations exceed the processor's caches, by an amount that depends on the lengths, and attention in a packed row is
not linear in its tokens.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from anybatch.core.batch import lengths_of
from anybatch.core.geometry import ceil_div
from anybatch.core.splitting import Cut, even_parts
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.loss_check.held import HeldDraws
from anybatch.engine.loss_check.runs import LossRuns, Piece, UndecidedError, difference
from anybatch.engine.micro_batch_size.search import WORTH_TIMING, TrialParts, TrialRuns
from anybatch.engine.per_sample_dropout import SampleRandomness
from anybatch.engine.user_code import SeededGenerators
from anybatch.parallel.world import World

_NUM_COST_TIMINGS = 4  # the first warms up, and the shortest of the others counts
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
        for _ in range(_NUM_COST_TIMINGS):
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


_TIMES = 3  # the median counts: large micro-batches are usually slower than their best time
_NOT_AGAIN = 1.1  # ways that take longer than this times the fastest are run once
_MOST_TIMED = 8
_MOST_HALVINGS = 6
_WORTH_A_SMALLER_CAP = 0.98  # a smaller gain may be noise, and a smaller cap makes more micro-batches
_NUM_COMPARED = 4
_DIFFERS = 1e-3  # in float32, for two layouts whose sums round in different order
_LOW = 30.0  # multiplies this tolerance in bf16 and fp16


class Way(NamedTuple):
    """A way to cut: packed (samples are concatenated without padding) or padded, and the cap on its tokens."""

    packed: bool
    cap: int


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A micro-batch that represents several in a timing."""

    positions: Sequence[int]
    factor: float


def sampled_units(lengths: SampleLengths, budget: TokenBudget) -> list[SampledUnit]:
    """Return micro-batches that represent an effective batch on one rank: all of them if they are few."""
    plan = plan_by_length(lengths, 1, Cut(), budget)
    weighed = []
    for unit in plan.units:
        positions = plan.positions(unit)
        costs = [budget.cost(lengths.laid_out[place]) for place in positions]
        weighed.append((sum(costs) / len(costs), (budget.fixed_tokens or 0.0) + tokens_of(costs, lengths), positions))
    # By the lengths of their samples, which determine the cost of a token, so that neighbours are similar. Weights
    # distinguish them less, since a smaller cap fills most micro-batches alike.
    weighed.sort(key=lambda entry: entry[:2])
    ends = itertools.accumulate(even_parts(len(weighed), min(_MOST_TIMED, len(weighed))), initial=0)
    sampled = []
    for start, stop in itertools.pairwise(ends):
        _, weight, positions = weighed[(start + stop) // 2]
        total = sum(other for _, other, _ in weighed[start:stop])
        sampled.append(SampledUnit(positions, total / weight if weight else float(stop - start)))
    return sampled


def units_by_cap(lengths: SampleLengths, costs: TokenCosts, budget: TokenBudget) -> dict[Way, list[SampledUnit]]:
    """Return the micro-batches that represent a step at each cap, without caps that give the same cut."""
    found: dict[Way, list[SampledUnit]] = {}
    for cap in caps_to_time(lengths, budget) if costs.cut_at is None else [costs.cut_at]:
        units = sampled_units(lengths, dataclasses.replace(costs, cut_at=cap).settled(budget))
        if units not in found.values():
            found[Way(lengths.packed, cap)] = units
    return found


def caps_to_time(lengths: SampleLengths, budget: TokenBudget) -> list[int]:
    """Return the budget, and its halvings below its largest micro-batch that have room for every sample."""
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if lengths.shapes or not plan.units:  # with given shapes, a smaller cap could leave a sample without a shape
        return [budget.tokens]
    largest = max(tokens_of([laid_out[place] for place in plan.positions(unit)], lengths) for unit in plan.units)
    halvings = (ceil_div(budget.tokens, 2**number) for number in range(1, budget.tokens.bit_length()))
    return [budget.tokens, *[cap for cap in halvings if max(laid_out) <= cap < largest][:_MOST_HALVINGS]]


def best_cap(seconds: Mapping[Way, float], *, packed: bool) -> Way | None:
    """Return the largest cap of a layout within 2% of its fastest; None if none was timed."""
    ways = [way for way in seconds if way.packed == packed]
    least = min((seconds[way] for way in ways), default=0.0)
    good = (way for way in ways if seconds[way] * _WORTH_A_SMALLER_CAP <= least)
    return max(good, key=lambda way: way.cap, default=None)


def seconds_of_steps(
    runs: Runs, loads: Mapping[bool, Load], units: Mapping[Way, Sequence[SampledUnit]], *, drops_slow: bool = True
) -> tuple[dict[Way, float], dict[Way, str]]:
    """Time the micro-batches of a step in several ways, interleaved, so that a slower machine slows all ways."""
    loaded = {way: [loads[way.packed](unit.positions) for unit in chosen] for way, chosen in units.items()}
    times: dict[Way, list[list[float]]] = {way: [[] for _ in chosen] for way, chosen in units.items()}
    failed: dict[Way, str] = {}

    def run_once(way: Way) -> None:
        for unit, batch, taken in zip(units[way], loaded[way], times[way], strict=True):
            result = runs(batch, len(unit.positions)).run(len(unit.positions), 1)
            if result.outcome != "ran":
                failed[way] = result.error or "it runs out of memory"
                return
            taken.extend(result.seconds)  # empty for a micro-batch with a count of 0, which is not run

    def seconds() -> dict[Way, float]:
        return {
            way: sum(unit.factor * median(taken) for unit, taken in zip(chosen, times[way], strict=True) if taken)
            for way, chosen in units.items()
            if way not in failed
        }

    for way in units:
        run_once(way)
    first = seconds()
    least = min(first.values(), default=0.0)
    for _ in range(_TIMES - 1):
        for way, taken in first.items():
            if way not in failed and (taken <= _NOT_AGAIN * least or not drops_slow):
                run_once(way)
    return seconds(), failed


def why_not_packed(runs: LossRuns, loads: Mapping[bool, Load], lengths: SampleLengths) -> str:
    """Return why packing must not be used, as a clause; empty if it leaves the gradient of a few samples unchanged."""
    by_length = sorted(range(len(lengths.tokens)), key=lengths.tokens.__getitem__)
    middle = max(0, (len(by_length) - _NUM_COMPARED) // 2)
    chosen = by_length[middle : middle + _NUM_COMPARED]
    if len(chosen) < 2:  # noqa: PLR2004 (a single sample)
        return "there is only one sample"
    # The layouts share no sample axis, so random draws must be constant.
    runs.draws = HeldDraws(constant=True)
    try:
        packed = runs.gradient([Piece(loads[True](chosen), len(chosen))], is_full=True)
        error, _ = difference(packed, runs.gradient([Piece(loads[False]([place]), 1) for place in chosen]))
    except UndecidedError as failed:
        return f"the gradient of packed samples cannot be compared: {failed}"
    except torch.OutOfMemoryError:
        return "a few packed samples run out of memory"
    except Exception as failed:  # noqa: BLE001 (a model may fail on packed samples only)
        return f"the model does not accept packed samples ({type(failed).__name__}: {failed})"
    if error > _DIFFERS * (_LOW if runs.narrowest.itemsize < torch.float32.itemsize else 1.0):
        return f"the model mixes packed samples: their gradient differs by {error:.1e} from separate samples"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """The result of the trial runs."""

    costs: TokenCosts
    packed: bool | None = None
    layout: str = ""


@dataclass(eq=False, repr=False)
class BudgetTrials:
    """Trial runs under a token budget. All ranks run them, and rank 0's clock decides for all."""

    world: World
    trial: TrialParts
    budget: TokenBudget
    clock: Callable[[], float]

    def find(self, batch: Any, known: TokenCosts | None) -> FoundBudget:  # noqa: ANN401 (any nested batch)
        """Return the cost of a micro-batch, and the layout if the batch allows both."""
        lengths = lengths_of(batch)
        if lengths is None:  # the planner refuses it
            return FoundBudget(costs=known or assumed("the batch has no lengths"))
        loads = {lengths.packed: _load_of(batch)}
        if lengths.either:
            loads = {packed: _load_of(batch.in_layout(packed=packed)) for packed in (False, True)}
        reason = self._why_not_timed(lengths)
        why_padded = (self._why_padded() or reason) if lengths.either else ""

        def find(generators: SeededGenerators) -> FoundBudget:
            why = why_padded
            if lengths.either and not why:
                why = why_not_packed(self.trial.loss_runs(generators), loads, lengths)
            found = self._timed({False: loads[False]} if why else loads, lengths, known)
            return _padded(found, why) if why else found

        if reason or (known is not None and (why_padded or not lengths.either)):
            found = FoundBudget(costs=known or assumed(reason))
            return _padded(found, why_padded) if why_padded else found
        with self.trial.undone(self.world.device) as generators:
            # Loading may raise on one rank; then all ranks raise instead of waiting for it.
            first: FoundBudget = self.world.run_on_all_ranks(lambda: find(generators))[0]
        return first

    def _why_padded(self) -> str:
        """Return why samples cannot be packed, as a clause; empty if a trial must decide."""
        if not self.trial.context.loss.allows_other_rows:
            return "the loss is a mean over samples, and packed micro-batches have one row"
        if isinstance(self.trial.context.randomness, SampleRandomness):
            return "random numbers belong to samples (rng='per_sample'), and packed ones share a row"
        return ""

    @property
    def _waits(self) -> bool:
        """Whether ranks wait for each other in each forward."""
        return self.trial.context.strategy.capabilities.lockstep or self.world.has_model_groups

    def _why_not_timed(self, lengths: SampleLengths) -> str:
        if len(lengths.tokens) * self.trial.num_parameters < WORTH_TIMING:
            return "a step is too short to be worth timing"
        if self._waits and (self.world.device.type != "cpu" or lengths.either):
            return "ranks run in lockstep and cannot run alone"
        return self.trial.why_clocks_do_not_count

    def _timed(self, loads: Mapping[bool, Load], lengths: SampleLengths, known: TokenCosts | None) -> FoundBudget:
        """Time a step in each layout, cut at the budget and at halvings of it, and choose the fastest way."""
        num_samples, budget = len(lengths.tokens), self.budget
        runs = functools.partial(self._runs, num_samples)
        costs: dict[bool, TokenCosts] = {}
        units: dict[Way, list[SampledUnit]] = {}
        for packed, load in loads.items():
            laid_out = lengths.in_layout(packed=packed)
            costs[packed] = known or measured_costs(runs, load, laid_out, budget)
            units |= units_by_cap(laid_out, costs[packed], budget)
        if len(units) == 1:  # there is only one way to cut
            return FoundBudget(costs=next(iter(costs.values())))
        seconds, failed = seconds_of_steps(runs, loads, units, drops_slow=not self._waits)
        best = {packed: way for packed in loads if (way := best_cap(seconds, packed=packed)) is not None}
        is_open = len(loads) > 1
        if not best:  # the step itself raises the error
            words = "padded, because no micro-batch could be timed" if is_open else ""
            return FoundBudget(costs=costs[min(costs)], packed=False if is_open else None, layout=words)
        chosen = min(best.values(), key=seconds.__getitem__)
        found = _cut_at(chosen, costs[chosen.packed], seconds, budget)
        if not is_open:
            return FoundBudget(costs=found)
        name, other = ("packed", "padded") if chosen.packed else ("padded", "packed")
        slower = best.get(not chosen.packed)
        if slower is None:
            why = next(reason for way, reason in failed.items() if way.packed != chosen.packed)
            words = f"{name}, because {other} could not be timed ({why})"
        else:
            words = f"{seconds[chosen] * 1e3:.4g} ms for the micro-batches of a step of {num_samples:,} samples"
            words = f"{name}, measured: {words}, and {seconds[slower] * 1e3:.4g} ms {other}"
        return FoundBudget(costs=found, packed=chosen.packed, layout=words)

    def _runs(self, num_in_batch: int, batch: Batch, num_samples: int) -> TrialRuns:
        def pieces(_size: int, _most: int) -> list[Batch]:
            return [copied(batch)]

        return TrialRuns(
            self.trial, pieces, num_samples, num_in_batch=num_in_batch, device=self.world.device, clock=self.clock
        )


def _cut_at(chosen: Way, costs: TokenCosts, seconds: Mapping[Way, float], budget: TokenBudget) -> TokenCosts:
    """Return the costs with the chosen cap, and with the time that it saves if it is below the budget."""
    found = dataclasses.replace(costs, cut_at=chosen.cap)
    if chosen.cap == budget.tokens or costs.cut_at is not None:
        return found
    whole = seconds.get(Way(chosen.packed, budget.tokens))
    why = "larger ones do not run" if whole is None else f"a step then takes {1 - seconds[chosen] / whole:.0%} less"
    return dataclasses.replace(found, words=f"{costs.words}; cut at {chosen.cap:,}, because {why}")


def _padded(found: FoundBudget, reason: str) -> FoundBudget:
    return dataclasses.replace(found, packed=False, layout=f"padded, because {reason}")


def _load_of(batch: Any) -> Load:  # noqa: ANN401 (an effective batch)
    return lambda positions: next(batch.feed([positions]))
