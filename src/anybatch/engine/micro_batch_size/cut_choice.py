"""The fastest cut of a batch, padded or packed, at the token budget or below it, by timing a step.

Each way is timed, since a cost per token does not predict it: tokens take longer in a micro-batch whose activations
exceed the processor's caches, by an amount that depends on the lengths, and attention in a packed row is not linear in
its tokens.
"""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from anybatch.core.geometry import ceil_div
from anybatch.core.splitting import Cut, even_parts
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.loss_check.held import HeldDraws
from anybatch.engine.loss_check.runs import LossRuns, Piece, UndecidedError, difference
from anybatch.engine.micro_batch_size.token_costs import Runs, TokenCosts, tokens_of

_TIMES = 3  # the median counts: large micro-batches are usually slower than their best time
_NOT_AGAIN = 1.1  # ways that take longer than this times the fastest are run once
_MOST_TIMED = 8
_MOST_HALVINGS = 6
_WORTH_A_SMALLER_CAP = 0.98  # a smaller gain may be noise, and a smaller cap makes more micro-batches
_NUM_COMPARED = 4
_DIFFERS = 1e-3  # in float32, for two layouts whose sums round in different order
_LOW = 30.0  # multiplies this tolerance in bf16 and fp16

Load = Callable[[Sequence[int]], Batch]
"""Function (positions in the effective batch) -> their samples, collated."""
K = TypeVar("K", bound=Hashable)


class Way(NamedTuple):
    """A way to cut.

    Attributes:
        packed: samples are concatenated without padding.
        cap: maximum tokens of a micro-batch.
    """

    packed: bool
    cap: int


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A micro-batch that represents several in a timing.

    Attributes:
        positions: positions of its samples in the effective batch.
        factor: cost of all represented micro-batches over the cost of this one.
    """

    positions: Sequence[int]
    factor: float


def sampled_units(lengths: SampleLengths, budget: TokenBudget) -> list[SampledUnit]:
    """Return micro-batches that represent an effective batch on one rank: all of them if they are few.

    Args:
        lengths: lengths of its samples, in one layout.
        budget: the cap in that layout, and the cost of tokens.
    """
    plan = plan_by_length(lengths, 1, Cut(), budget)
    laid_out = lengths.laid_out
    fixed = budget.fixed_tokens or 0.0
    weighed = []
    for unit in plan.units:
        positions = plan.positions(unit)
        costs = [budget.cost(laid_out[place]) for place in positions]
        weighed.append((sum(costs) / len(costs), fixed + tokens_of(costs, lengths), positions))
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


def units_by_cut(
    lengths: Mapping[bool, SampleLengths], costs: Mapping[bool, TokenCosts], budget: TokenBudget
) -> dict[Way, list[SampledUnit]]:
    """Return the micro-batches that represent a step in each way, without ways that give the same cut.

    Args:
        lengths: lengths of its samples by layout: padded (False), packed (True), or both.
        costs: cost of a micro-batch by layout, and its cap if known.
        budget: the largest cap, and the cost of tokens.
    """
    found: dict[Way, list[SampledUnit]] = {}
    for packed, of_samples in lengths.items():
        costs_here = costs[packed]
        for cap in caps_to_time(of_samples, budget) if costs_here.cut_at is None else [costs_here.cut_at]:
            units = sampled_units(of_samples, dataclasses.replace(costs_here, cut_at=cap).settled(budget))
            if units not in [others for way, others in found.items() if way.packed == packed]:
                found[Way(packed, cap)] = units
    return found


def caps_to_time(lengths: SampleLengths, budget: TokenBudget) -> list[int]:
    """Return the budget, and its halvings below its largest micro-batch that have room for every sample."""
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if lengths.shapes or not plan.units:  # with given shapes, a smaller cap could leave a sample without a shape
        return [budget.tokens]
    largest = max(tokens_of([laid_out[place] for place in plan.positions(unit)], lengths) for unit in plan.units)
    longest = max(laid_out)
    halvings = (ceil_div(budget.tokens, 2**number) for number in range(1, budget.tokens.bit_length()))
    return [budget.tokens, *[cap for cap in halvings if longest <= cap < largest][:_MOST_HALVINGS]]


def best_cap(seconds: Mapping[Way, float], *, packed: bool) -> Way | None:
    """Return the largest cap of a layout within 2% of its fastest; None if none was timed."""
    ways = [way for way in seconds if way.packed == packed]
    least = min((seconds[way] for way in ways), default=0.0)
    good = (way for way in ways if seconds[way] * _WORTH_A_SMALLER_CAP <= least)
    return max(good, key=lambda way: way.cap, default=None)


def seconds_of_steps(
    runs: Runs, loads: Mapping[K, Load], units: Mapping[K, Sequence[SampledUnit]], *, drops_slow: bool = True
) -> tuple[dict[K, float], dict[K, str]]:
    """Time the micro-batches of a step in several ways, interleaved, so that a slower machine slows all ways.

    Args:
        runs: function (pieces, number of samples) -> their trial runs.
        loads: loads samples in the layout of each way.
        units: the micro-batches that represent a step, by way.
        drops_slow: run clearly slower ways only once; False if ranks, which have separate clocks, must run the same.

    Returns:
        Seconds of all micro-batches of a step by way, and the reason (a clause) for each way that could not be timed.
    """
    loaded = {way: [loads[way](unit.positions) for unit in chosen] for way, chosen in units.items()}
    times: dict[K, list[list[float]]] = {way: [[] for _ in chosen] for way, chosen in units.items()}
    failed: dict[K, str] = {}

    def run_once(way: K) -> None:
        for unit, batch, taken in zip(units[way], loaded[way], times[way], strict=True):
            trial = runs(lambda _size, _most, batch=batch: [copied(batch)], len(unit.positions))  # type: ignore[misc]  # bound now
            result = trial.run(len(unit.positions), 1)
            if result.outcome != "ran":
                failed[way] = result.error or "it runs out of memory"
                return
            taken.extend(result.seconds)  # empty for a micro-batch with a count of 0, which is not run

    def seconds() -> dict[K, float]:
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
    """Return why packing must not be used, as a clause; empty if it leaves the gradient unchanged.

    Args:
        runs: runs the loss.
        loads: loads samples padded (False), and packed (True).
        lengths: lengths of the samples of the effective batch.
    """
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
