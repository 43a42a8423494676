"""How a batch is cut that leaves it open, padded or packed, whole budgets or parts of them: by the time of a step.

A step is timed in each way, since no price of a token tells it: in a large micro-batch, whose activations leave the
processor's caches, a token takes longer, by how much depends on how long its sample is, and a packed row's attention is
no straight line in its tokens.
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

_TIMES = 3  # the middle one counts: large micro-batches take longer in most steps than in the best one
_NOT_AGAIN = 1.1  # of the fastest way's time: what takes longer is run once
_MOST_TIMED = 8
_MOST_HALVINGS = 6
_WORTH_A_SMALLER_CAP = 0.98  # of the time of a step: what is less may be chance, and smaller micro-batches are more
_NUM_COMPARED = 4
_DIFFERS = 1e-3  # in float32, between two layouts, whose sums are rounded in another order
_LOW = 30.0  # so many times as much in bf16 and fp16

Load = Callable[[Sequence[int]], Batch]
"""From positions in the effective batch to these samples, collated."""
K = TypeVar("K", bound=Hashable)


class Way(NamedTuple):
    """A way to cut.

    Attributes:
        packed: samples lie one behind the other, without padding.
        cap: most tokens of a micro-batch.
    """

    packed: bool
    cap: int


@dataclass(frozen=True, slots=True)
class SampledUnit:
    """A micro-batch to time in place of several.

    Attributes:
        positions: of its samples in the effective batch.
        factor: by how much more all of them cost than this one.
    """

    positions: Sequence[int]
    factor: float


def sampled_units(lengths: SampleLengths, budget: TokenBudget) -> list[SampledUnit]:
    """Return micro-batches that stand for all of an effective batch on one rank: every one where these are few.

    Args:
        lengths: of its samples, in one layout.
        budget: how they are cut in that layout, and what tokens cost.
    """
    plan = plan_by_length(lengths, 1, Cut(), budget)
    laid_out = lengths.laid_out
    fixed = budget.fixed_tokens or 0.0
    weighed = []
    for unit in plan.units:
        positions = plan.positions(unit)
        costs = [budget.cost(laid_out[place]) for place in positions]
        weighed.append((sum(costs) / len(costs), fixed + tokens_of(costs, lengths), positions))
    # By the length of their samples, on which the price of a token depends: those that are like each other stand side
    # by side. Their weights tell less, since a smaller cap fills most of them alike.
    weighed.sort(key=lambda one: one[:2])
    ends = itertools.accumulate(even_parts(len(weighed), min(_MOST_TIMED, len(weighed))), initial=0)
    found = []
    for start, stop in itertools.pairwise(ends):
        _, weight, positions = weighed[(start + stop) // 2]
        of_all = sum(one for _, one, _ in weighed[start:stop])
        found.append(SampledUnit(positions, of_all / weight if weight else float(stop - start)))
    return found


def units_by_way(
    lengths: Mapping[bool, SampleLengths], costs: Mapping[bool, TokenCosts], budget: TokenBudget
) -> dict[Way, list[SampledUnit]]:
    """Return the micro-batches that stand for a step, in each way that cuts another one.

    Args:
        lengths: of its samples, padded (False) or packed (True), or both.
        costs: what a micro-batch costs in each of them, and its cap if that is known.
        budget: the largest cap, and what tokens cost.
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
    """Return the budget, and halvings of it: those that are less than its largest micro-batch, and hold any sample."""
    laid_out = lengths.laid_out
    plan = plan_by_length(lengths, 1, Cut(), budget)
    if lengths.shapes or not plan.units:  # in few shapes a smaller cap could leave a sample without one
        return [budget.tokens]
    largest = max(tokens_of([laid_out[place] for place in plan.positions(unit)], lengths) for unit in plan.units)
    longest = max(laid_out)
    halvings = (ceil_div(budget.tokens, 2**number) for number in range(1, budget.tokens.bit_length()))
    return [budget.tokens, *[cap for cap in halvings if longest <= cap < largest][:_MOST_HALVINGS]]


def best_cap(seconds: Mapping[Way, float], *, packed: bool) -> Way | None:
    """Return the largest cap that takes about as long as the fastest one, in one layout; None where none was timed."""
    ways = [way for way in seconds if way.packed == packed]
    least = min((seconds[way] for way in ways), default=0.0)
    good = (way for way in ways if seconds[way] * _WORTH_A_SMALLER_CAP <= least)
    return max(good, key=lambda way: way.cap, default=None)


def seconds_of_steps(
    runs: Runs, loads: Mapping[K, Load], units: Mapping[K, Sequence[SampledUnit]], *, drops_slow: bool = True
) -> tuple[dict[K, float], dict[K, str]]:
    """Time the micro-batches of a step in several ways, in turns, so that a machine that slows down slows all.

    Args:
        runs: function (pieces, number of samples) -> what runs them.
        loads: loads samples as each way lays them out.
        units: the micro-batches that stand for a step in each way.
        drops_slow: run a way once that takes far longer than another; False where ranks, each with a clock of its own,
            have to run the same.

    Returns:
        Seconds of all micro-batches of a step, by way; and why one could not be timed, a clause.
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
            taken.extend(result.seconds)  # none of a micro-batch that counts nothing, which is not run

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
    """Return why packed samples do not have the gradient that they have by themselves; nothing if they have.

    Args:
        runs: runs the loss.
        loads: loads samples padded (False), and packed (True).
        lengths: of the samples of the effective batch.
    """
    by_length = sorted(range(len(lengths.tokens)), key=lengths.tokens.__getitem__)
    middle = max(0, (len(by_length) - _NUM_COMPARED) // 2)
    chosen = by_length[middle : middle + _NUM_COMPARED]
    if len(chosen) < 2:  # noqa: PLR2004 (one sample sees no other)
        return "there is only one sample"
    # The layouts have no axis of samples in common, so draws must be the same everywhere.
    runs.draws = HeldDraws(constant=True)
    try:
        packed = runs.gradient([Piece(loads[True](chosen), len(chosen))], is_full=True)
        error, _ = difference(packed, runs.gradient([Piece(loads[False]([place]), 1) for place in chosen]))
    except UndecidedError as failed:
        return f"the gradient of packed samples cannot be compared: {failed}"
    except torch.OutOfMemoryError:
        return "a few packed samples run out of memory"
    except Exception as failed:  # noqa: BLE001 (what runs padded need not run packed)
        return f"the model does not take packed samples ({type(failed).__name__}: {failed})"
    if error > _DIFFERS * (_LOW if runs.narrowest.itemsize < torch.float32.itemsize else 1.0):
        return f"the model lets packed samples see each other: their gradient is {error:.1e} from that by themselves"
    return ""
