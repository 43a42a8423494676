"""Trial runs for `ab.token_budget`: a micro-batch's fixed cost in tokens, its maximum of tokens ("cap"), its layout.

Whole steps are timed, since the time per token is not constant: it is longer in a micro-batch whose activations exceed
the processor's caches, and attention in a packed row is not linear in the number of tokens.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from anybatch.core.geometry import ceil_div
from anybatch.core.splitting import SplitOptions, even_parts
from anybatch.core.token_budget import FIXED_TOKENS, SampleLengths, TokenBudget, plan_by_length
from anybatch.core.tree import Batch, copied
from anybatch.engine.loss_check.fixed_draws import FixedDraws
from anybatch.engine.loss_check.runs import LossRuns, Piece, difference
from anybatch.engine.micro_batch_size.search import WORTH_TIMING, TrialParts, TrialResult, TrialRuns
from anybatch.engine.user_code import SeededGenerators
from anybatch.parallel.world import World

_NUM_COST_TIMINGS = 4  # the first run warms up, and the shortest time of the other runs is used
_MIN_RATIO = 4  # minimum ratio of the tokens of two micro-batches to be compared
_SMALL_BUDGET_DIVISOR = 8  # up to an eighth of the budget, the time per token is constant
_NUM_CAPS = 3  # the budget, a half and a quarter of it
_NUM_ROUNDS = 3  # the median is used, since the best time of a large micro-batch is not typical
_MAX_TIMED = 8  # maximum number of micro-batches of a step that are timed
_MAX_TIME_RATIO = 0.97  # a smaller cap must take at most this fraction of the time; a smaller gain may be noise
_NUM_COMPARED = 4
_TOLERANCE = 1e-3  # relative difference in float32 of two layouts whose sums round in different order
_LOW_PRECISION_FACTOR = 30.0  # multiplies this tolerance in bf16 and fp16
_NAMES = {False: "padded", True: "packed"}

Load = Callable[[Sequence[int]], Batch]
"""Function (positions in the effective batch) -> the samples at these positions, collated."""


class _Split(NamedTuple):
    """A split to time: packed (samples are concatenated without padding) or padded, and the maximum tokens (cap)."""

    packed: bool
    cap: int


class _Sampled(NamedTuple):
    """A micro-batch that represents several similar micro-batches; their total time is `factor` times its time."""

    positions: Sequence[int]
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """The result of the trial runs; `packed` is None for a batch with one layout.

    `cap` is None if it was not searched. `description` (cost and cap) and `layout` are texts.
    """

    fixed_tokens: float
    cap: int | None = None
    packed: bool | None = None
    description: str = ""
    layout: str = ""


@dataclass(eq=False, repr=False)
class BudgetTrials:
    """Trial runs with a token budget. All ranks run them, and all use the results of rank 0's clock.

    If the budget has `fixed_tokens`, its cost and its cap are used, and only the layout is chosen.
    """

    world: World
    trial: TrialParts
    budget: TokenBudget
    clock: Callable[[], float]

    def find(self, batch: Any, lengths: SampleLengths) -> FoundBudget:  # noqa: ANN401 (an effective batch)
        """Return the cost of a micro-batch, the fastest cap, and the layout if the batch allows both."""
        if reason := self._why_not_timed(lengths):
            fixed, description = self._assumed(reason)
            default = FoundBudget(fixed_tokens=fixed, description=description)
            return _padded(default, reason) if lengths.has_both_layouts else default
        with self.trial.restoring_state(self.world.device) as generators:
            # If loading fails on one rank, all ranks raise an error instead of waiting for the rank.
            first: FoundBudget = self.world.run_on_all_ranks(lambda: self._find(batch, lengths, generators))[0]
        return first

    def _find(self, batch: Any, lengths: SampleLengths, generators: SeededGenerators) -> FoundBudget:  # noqa: ANN401
        if not lengths.has_both_layouts:
            return self._timed({lengths.packed: _load_of(batch)}, lengths)
        loads = {packed: _load_of(batch.in_layout(packed=packed)) for packed in (False, True)}
        why_padded = self._why_padded() or _why_not_packed(self.trial.loss_runs(generators), loads, lengths)
        if not why_padded:
            return self._timed(loads, lengths)
        return _padded(self._timed({False: loads[False]}, lengths), why_padded)

    def _why_padded(self) -> str:
        """Return why samples cannot be packed, as a clause; empty if only a trial run can tell."""
        if not self.trial.context.loss.allows_other_rows:
            return "the loss is a mean over samples, and packed micro-batches have one row"
        if self.trial.context.randomness.covers_backward:
            return "random numbers are seeded per sample (rng='per_sample'), and packed samples share a row"
        return ""

    def _why_not_timed(self, lengths: SampleLengths) -> str:
        if len(lengths.tokens) * self.trial.num_parameters < WORTH_TIMING:
            return "a step is too short to be worth timing"
        if self.trial.context.strategy.capabilities.lockstep:
            return "ranks run in lockstep and cannot run alone"
        return self.trial.why_not_timed

    def _timed(self, loads: Mapping[bool, Load], lengths: SampleLengths) -> FoundBudget:
        """Time a step in each layout, split at the budget and at halves of it, and return the fastest split."""
        costs: dict[bool, tuple[float, str]] = {}
        units: dict[_Split, list[_Sampled]] = {}
        for packed, load in loads.items():
            occupied = lengths.in_layout(packed=packed)
            costs[packed] = self._fixed_cost(load, occupied)
            of_layout: dict[_Split, list[_Sampled]] = {}
            for cap in self._caps(occupied):
                budget = dataclasses.replace(self.budget, fixed_tokens=costs[packed][0], current_tokens=cap)
                sampled = _sampled_units(occupied, budget)
                if sampled not in of_layout.values():
                    of_layout[_Split(packed, cap)] = sampled
            units |= of_layout
        seconds = self._seconds(loads, units) if len(units) > 1 else {}
        # If no split could be timed, the step itself raises the error.
        fastest = min(seconds, key=seconds.__getitem__, default=next(iter(units)))
        similar = [split for split, duration in seconds.items() if duration * _MAX_TIME_RATIO <= seconds[fastest]]
        chosen = max((split for split in similar if split.packed == fastest.packed), default=fastest)
        fixed, description = costs[chosen.packed]
        if description and chosen.cap < self.budget.tokens:
            uncapped = seconds.get(_Split(chosen.packed, self.budget.tokens))
            gain = "" if uncapped is None else f", because a step then takes {1 - seconds[chosen] / uncapped:.0%} less"
            description = f"{description}; split at {chosen.cap:,}{gain}"
        result = FoundBudget(fixed_tokens=fixed, cap=chosen.cap, description=description)
        if len(loads) == 1:
            return result
        return dataclasses.replace(result, packed=chosen.packed, layout=_compared(chosen, seconds, len(lengths.tokens)))

    def _caps(self, lengths: SampleLengths) -> list[int]:
        """Return the caps to time: the budget, and its half and quarter if every sample fits in them."""
        budget, longest = self.budget, max(lengths.occupied_tokens, default=0)
        if budget.fixed_tokens is not None:
            return [budget.current_tokens or budget.tokens]
        halvings = [ceil_div(budget.tokens, 2**number) for number in range(1, _NUM_CAPS)]
        return [budget.tokens, *(cap for cap in halvings if cap >= longest)]

    def _seconds(self, loads: Mapping[bool, Load], units: Mapping[_Split, Sequence[_Sampled]]) -> dict[_Split, float]:
        """Return the seconds of a step with each split that runs; the timings of the splits are interleaved."""
        batches = {split: [loads[split.packed](item.positions) for item in sampled] for split, sampled in units.items()}
        times: dict[_Split, list[list[float]]] = {split: [[] for _ in sampled] for split, sampled in units.items()}
        for split in list(units) * _NUM_ROUNDS:
            for sampled, batch, seconds in zip(units[split], batches[split], times.get(split, ()), strict=False):
                result = self._run(batch, len(sampled.positions))
                if result.outcome != "ran":
                    del times[split]
                    break
                seconds.extend(result.seconds)  # empty for a micro-batch without items of the loss, which is not run
        return {
            split: sum(
                item.factor * median(seconds) for item, seconds in zip(units[split], of_split, strict=True) if seconds
            )
            for split, of_split in times.items()
        }

    def _run(self, batch: Batch, num_samples: int) -> TrialResult:
        """Run one micro-batch."""
        runs = TrialRuns(
            self.trial,
            lambda _size, _most: [copied(batch)],
            num_samples,
            num_in_batch=num_samples,
            device=self.world.device,
            clock=self.clock,
        )
        return runs.run(num_samples, 1)

    def _fixed_cost(self, load: Load, lengths: SampleLengths) -> tuple[float, str]:
        """Return the fixed cost of a micro-batch, in tokens, and a clause about it.

        The cost is the intercept of the line through the times of two small micro-batches. Large micro-batches are not
        used, since a token takes longer in a micro-batch that exceeds the processor's caches.
        """
        if self.budget.fixed_tokens is not None:
            return self.budget.fixed_tokens, ""
        pieces = micro_batches_to_time(lengths, self.budget)
        if pieces is None:
            return self._assumed("the batch has no two micro-batches of clearly different sizes")
        tokens = lengths.occupied_tokens
        fewer, more = (_cost([self.budget.cost(tokens[index]) for index in piece], lengths) for piece in pieces)
        seconds = []
        for positions in pieces:
            batch = load(positions)
            results = [self._run(batch, len(positions)) for _ in range(_NUM_COST_TIMINGS)]
            failed = next((result for result in results if not result.seconds), None)
            if failed is not None:
                return self._assumed(f"a micro-batch could not be timed ({failed.error or failed.outcome})")
            seconds.append(min(result.seconds[0] for result in results[1:]))
        shorter, longer = seconds
        if longer <= shorter or more <= fewer:
            return self._assumed(f"{fewer:,.0f} tokens took as long as {more:,.0f}")
        fixed = min(max(0.0, shorter * (more - fewer) / (longer - shorter) - fewer), float(self.budget.tokens))
        description = (
            f"{fixed:,.0f} tokens per micro-batch, measured: {shorter * 1e3:.3g} ms for {fewer:,.0f} tokens, "
            f"{longer * 1e3:.3g} ms for {more:,.0f}"
        )
        return fixed, description

    def _assumed(self, reason: str) -> tuple[float, str]:
        """Return the cost of the budget, or else the default cost and a clause about it with the `reason`."""
        if self.budget.fixed_tokens is not None:
            return self.budget.fixed_tokens, ""
        return FIXED_TOKENS, f"{FIXED_TOKENS:,.0f} tokens per micro-batch, assumed, because {reason}"


def micro_batches_to_time(lengths: SampleLengths, budget: TokenBudget) -> tuple[list[int], list[int]] | None:
    """Return the positions of two micro-batches to time; None if no two differ enough in size.

    The first has only the shortest sample. The second has up to an eighth of the budget's tokens, in samples of similar
    length that are as short as possible.
    """
    occupied, max_tokens = lengths.occupied_tokens, budget.tokens // _SMALL_BUDGET_DIVISOR
    shortest = sorted(range(len(occupied)), key=occupied.__getitem__)
    largest, several = 0, shortest[:0]
    for end, index in enumerate(shortest, 1):
        length = occupied[index]
        number = min(end, max(1, max_tokens // max(1, length)))
        if number * length > largest:
            largest, several = number * length, shortest[end - number : end]
        if 2 * largest >= max_tokens:
            break
    is_larger = several and largest >= _MIN_RATIO * max(1, occupied[shortest[0]])
    return (shortest[:1], several) if is_larger else None


def _sampled_units(lengths: SampleLengths, budget: TokenBudget) -> list[_Sampled]:
    """Return micro-batches that represent an effective batch on one rank.

    Micro-batches are sorted by the lengths of their samples, and one micro-batch represents each group of neighbours.
    """
    plan, occupied = plan_by_length(lengths, 1, SplitOptions(), budget), lengths.occupied_tokens
    entries = []  # (mean cost of a sample, cost of the micro-batch, positions)
    for unit in plan.units:
        positions = plan.positions(unit)
        costs = [budget.cost(occupied[position]) for position in positions]
        entries.append((sum(costs) / len(costs), (budget.fixed_tokens or 0.0) + _cost(costs, lengths), positions))
    entries.sort(key=lambda entry: entry[:2])
    ends = itertools.accumulate(even_parts(len(entries), min(_MAX_TIMED, len(entries))), initial=0)
    sampled = []
    for start, stop in itertools.pairwise(ends):
        _, cost, positions = entries[(start + stop) // 2]
        total = sum(other for _, other, _ in entries[start:stop])
        sampled.append(_Sampled(positions, total / cost if cost else float(stop - start)))
    return sampled


def _cost(costs: Sequence[float], lengths: SampleLengths) -> float:
    """Return the cost of samples as one micro-batch: the sum if packed; the largest times their number if padded."""
    return sum(costs) if lengths.packed else len(costs) * max(costs)


def _why_not_packed(runs: LossRuns, loads: Mapping[bool, Load], lengths: SampleLengths) -> str:
    """Return why packing must not be used, as a clause; empty if it does not change the gradient of a few samples."""
    by_length = sorted(range(len(lengths.tokens)), key=lengths.tokens.__getitem__)
    middle = max(0, (len(by_length) - _NUM_COMPARED) // 2)
    chosen = by_length[middle : middle + _NUM_COMPARED]
    if len(chosen) < 2:  # noqa: PLR2004 (a single sample)
        return "there is only one sample"
    # Packed samples have no sample axis, so draws cannot be matched by sample; one number is used for all elements.
    runs.draws = FixedDraws(constant=True)
    try:
        packed = runs.gradient([Piece(loads[True](chosen), len(chosen))], is_full=True)
        error, _ = difference(packed, runs.gradient([Piece(loads[False]([index]), 1) for index in chosen]))
    except Exception as failed:  # noqa: BLE001 (a model may fail on packed samples only)
        return f"the model does not run on packed samples ({type(failed).__name__}: {failed})"
    if error > _TOLERANCE * (_LOW_PRECISION_FACTOR if runs.narrowest.itemsize < torch.float32.itemsize else 1.0):
        return f"the model mixes packed samples: their gradient differs by {error:.1e} from separate samples"
    return ""


def _compared(chosen: _Split, seconds: Mapping[_Split, float], num_samples: int) -> str:
    """Return a text about the chosen layout, with the times of both layouts."""
    name, other = _NAMES[chosen.packed], _NAMES[not chosen.packed]
    slower = min((duration for split, duration in seconds.items() if split.packed != chosen.packed), default=None)
    if chosen not in seconds or slower is None:
        return f"{name}, because {other} could not be timed"
    return (
        f"{name}, measured: {seconds[chosen] * 1e3:.4g} ms for the micro-batches of a step of {num_samples:,} samples, "
        f"and {slower * 1e3:.4g} ms {other}"
    )


def _padded(budget: FoundBudget, reason: str) -> FoundBudget:
    return dataclasses.replace(budget, packed=False, layout=f"padded, because {reason}")


def _load_of(batch: Any) -> Load:  # noqa: ANN401 (an effective batch)
    return lambda positions: next(batch.feed([positions]))
