"""Split an effective batch into micro-batches by sample length, for the fastest step under a limit on tokens.

The gradient does not depend on the split into micro-batches, so the fastest split may be used. A padded
micro-batch of n samples, the longest of L tokens, occupies `n L` tokens. Its cost, in units of one token's time, is

    fixed + n h(L)        with h(L) = L, or a user function that does not fall with L

For any limit on `n L`, one of the cheapest splits has the samples in order of length. Proof: of any two micro-batches,
exchange samples until one has all the longest samples. The sizes do not change, and no maximum rises.

In sorted order, the cheapest split is a shortest path, which is found exactly. Inside a run of equal lengths, only full
micro-batches need to be considered: any other one can take the next sample at no extra cost. So the search
takes `n + sum over distinct lengths of limit / L` operations, 20 ms for 16,384 samples.

Packed micro-batches have no padding: samples are concatenated, so fewer micro-batches are cheaper.

The slowest rank determines the time of a step. More micro-batches cost more in total but can be divided more evenly
over ranks, so a few splits are compared. In each, the most expensive micro-batch is assigned first, always to the rank
with the smallest cost so far (Graham 1969).
"""

import dataclasses
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anybatch.core.geometry import ceil_div, checked_int, is_number, require
from anybatch.core.splitting import BatchPlan, SplitOptions, Unit, plan_of
from anybatch.errors import BatchSizeError, UserError

FIXED_TOKENS = 256.0
"""Fixed cost of a micro-batch (such as kernel launches), in tokens, that is used without a measurement."""
_MAX_EXTRA_PER_RANK = 4
"""Maximum number of additional micro-batches per rank that are tried, so that ranks finish together."""
_NUM_BISECTIONS = 20
Cuts = list[list[int]]
"""Positions in the effective batch, by micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """Lengths of the samples of an effective batch, and their layout in a micro-batch.

    With `has_both_layouts` the collate function can both pad and pack, and `in_layout` chooses. Padded lengths are
    rounded up to a multiple of `multiple_of`.
    """

    tokens: Sequence[int]
    packed: bool = False
    has_both_layouts: bool = False
    multiple_of: int = 1

    @property
    def occupied_tokens(self) -> list[int]:
        """Tokens that each sample would occupy as the only sample of a micro-batch."""
        if self.packed or self.multiple_of == 1:
            return list(self.tokens)
        return [ceil_div(length, self.multiple_of) * self.multiple_of for length in self.tokens]

    def in_layout(self, *, packed: bool) -> "SampleLengths":
        """Return the same lengths, padded or packed, if the collate function can do both."""
        return dataclasses.replace(self, packed=packed, has_both_layouts=False) if self.has_both_layouts else self


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens of one micro-batch, and the cost of tokens; made by `token_budget`.

    `current_tokens` is the limit in use: below `tokens` after an out-of-memory error, or if a lower limit is faster.
    """

    tokens: int
    fixed_tokens: float | None = None
    sample_cost: Callable[[int], float] | None = field(default=None, hash=False)
    longer: Literal["error", "alone"] = "error"
    current_tokens: int | None = None

    def cost(self, length: int) -> float:
        """Return the cost of a sample of a padded length, in tokens."""
        return float(length) if self.sample_cost is None else float(self.sample_cost(length))


def token_budget(
    tokens: int,
    *,
    fixed_tokens: float | None = None,
    sample_cost: Callable[[int], float] | None = None,
    longer: Literal["error", "alone"] = "error",
) -> TokenBudget:
    """Return a budget for `Engine(micro_batch_size=...)`, which limits micro-batches by tokens instead of samples.

    The engine then groups samples of similar length, for speed, and divides micro-batches over ranks by their cost. The
    samples of a step and its gradient do not change. Pass lengths with the data: `ab.batches(dataset, lengths=...,
    collate=...)`. A "token" is the unit of the lengths, which may also be pixels, frames or seconds of audio.

    Args:
        tokens: maximum tokens of a micro-batch, including padding; choose it by memory.
        fixed_tokens: fixed cost of a micro-batch, in tokens. Larger values give fewer micro-batches with more padding.
            None: measured on the first batch if a step is long enough, otherwise 256.
        sample_cost: function of a sample's padded length that returns its cost in tokens, and does not decrease with
            the length; None: the length. For attention over samples of thousands of tokens use, say,
            `lambda length: length * (1 + length / 6_000)`.
        longer: for samples that are longer than the budget: "error" raises a `BatchSizeError`; "alone" runs each in a
            micro-batch of one sample, even if it may not fit into memory.

    Raises:
        BatchSizeError: `tokens` is not a whole number of at least 1.
        UserError: another argument is invalid.
    """
    checked_int("tokens", tokens, error=BatchSizeError)
    is_valid = fixed_tokens is None or (is_number(fixed_tokens) and fixed_tokens >= 0)
    require(is_valid, "fixed_tokens", fixed_tokens, "a number of tokens of at least 0, or None")
    is_valid = sample_cost is None or callable(sample_cost)
    require(is_valid, "sample_cost", sample_cost, "a function of a length, or None")
    if longer not in ("error", "alone"):
        message = f"{longer=} must be 'error' or 'alone'. To shorten samples, use anybatch.data.Padded(longest=...)."
        raise UserError(message, code="unknown_option")
    fixed = None if fixed_tokens is None else float(fixed_tokens)
    return TokenBudget(tokens=tokens, fixed_tokens=fixed, sample_cost=sample_cost, longer=longer)


def plan_by_length(lengths: SampleLengths, world_size: int, split: SplitOptions, budget: TokenBudget) -> BatchPlan:
    """Split an effective batch by length and divide it over ranks by cost, each rank's costliest micro-batch first.

    Only `split.deal` and `split.lockstep` are used. With a "balanced" deal, the split is the best for this number of
    ranks; with "fixed", it is the same for any number of ranks.
    """
    occupied = lengths.occupied_tokens
    _check_longest(lengths, occupied, budget)
    costs = _costs(occupied, budget)
    cap = budget.tokens if budget.current_tokens is None else budget.current_tokens
    fixed = FIXED_TOKENS if budget.fixed_tokens is None else budget.fixed_tokens
    num_targets = world_size if split.deal == "balanced" else 1
    if lengths.packed:
        candidates = _packed_cuts(occupied, costs, cap, num_targets)
    else:
        candidates = _padded_cuts(occupied, costs, cap, fixed, num_targets)
    dealt: list[tuple[float, int, list[Cuts]]] = []
    for number, units in enumerate(candidates):
        unit_costs = [fixed + _unit_cost(unit, costs, packed=lengths.packed) for unit in units]
        shares, cost = _deal(units, unit_costs, world_size, lockstep=split.lockstep)
        dealt.append((cost, number, shares))
    _, _, shares = min(dealt, key=lambda entry: entry[:2])  # of equally fast splits, the one with the fewest units
    order = tuple(position for share in shares for unit in share for position in unit)
    ends = list(itertools.accumulate((len(unit) for share in shares for unit in share), initial=0))
    numbered = iter(Unit(number, *bounds) for number, bounds in enumerate(itertools.pairwise(ends)))
    return plan_of(len(occupied), tuple(tuple(next(numbered) for _ in share) for share in shares), split, order)


def _check_longest(lengths: SampleLengths, occupied: Sequence[int], budget: TokenBudget) -> None:
    if budget.longer == "alone":
        return
    longest = max(range(len(occupied)), key=occupied.__getitem__, default=None)
    if longest is not None and occupied[longest] > budget.tokens:
        padded = f" ({occupied[longest]:,} padded)" if occupied[longest] != lengths.tokens[longest] else ""
        message = (
            f"sample {longest} of the batch has {lengths.tokens[longest]:,} tokens{padded}, but the token budget is "
            f"{budget.tokens:,}. Raise the budget; or give such samples their own micro-batches with "
            "token_budget(..., longer='alone'), if memory suffices; or shorten them with "
            "anybatch.data.Padded(longest=...)."
        )
        raise BatchSizeError(message, code="sample_too_long")


def _costs(occupied: Sequence[int], budget: TokenBudget) -> list[float]:
    """Return the cost of each sample at its own padded length, in tokens."""
    by_length = {length: budget.cost(length) for length in set(occupied)}
    for shorter, longer in itertools.pairwise(sorted(by_length)):
        if not 0 <= by_length[shorter] <= by_length[longer] < math.inf:
            message = (
                f"sample_cost must not decrease with the length, but it is {by_length[shorter]} for {shorter} tokens "
                f"and {by_length[longer]} for {longer}."
            )
            raise UserError(message, code="falling_cost")
    return [by_length[length] for length in occupied]


def _padded_cuts(occupied: Sequence[int], costs: Sequence[float], cap: int, fixed: float, num_ranks: int) -> list[Cuts]:
    """Return the cheapest split; for several ranks also splits with lower limits on the cost of a micro-batch."""
    order = sorted(range(len(occupied)), key=occupied.__getitem__)
    lengths, by_length = [occupied[index] for index in order], [costs[index] for index in order]
    splits = [cheapest_split(lengths, by_length, cap, fixed)[0]]
    if num_ranks > 1 and lengths:
        minimum = ceil_div(len(fewest_units(lengths, by_length, cap)), num_ranks)
        for per_rank in range(minimum, minimum + _MAX_EXTRA_PER_RANK):
            limit, ends = _most_even_cut(lengths, by_length, cap, per_rank * num_ranks)
            splits += [ends, cheapest_split(lengths, by_length, cap, fixed, limit)[0]]
    return [[order[start:stop] for start, stop in itertools.pairwise([0, *ends])] for ends in splits]


def fewest_units(lengths: Sequence[int], costs: Sequence[float], cap: int, limit: float = math.inf) -> list[int]:
    """Split into as few micro-batches as possible, filled from the longest sample down; return where each one ends.

    `lengths` (padded) and `costs` (of each sample) are in ascending order. `cap` limits the tokens of a micro-batch and
    `limit` its cost; a single sample may exceed either limit.
    """
    ends, end = [], len(lengths)
    while end:
        ends.append(end)
        end -= min(end, _max_samples(lengths[end - 1], costs[end - 1], cap, limit, end))
    return ends[::-1]


def _most_even_cut(lengths: Sequence[int], costs: Sequence[float], cap: int, num_units: int) -> tuple[float, list[int]]:
    """Return nearly the lowest limit on costs for which `num_units` micro-batches suffice, and their ends."""
    low, high = costs[-1], costs[-1] * len(costs)
    ends = fewest_units(lengths, costs, cap, high)
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        tried = fewest_units(lengths, costs, cap, middle)
        if len(tried) <= num_units:
            high, ends = middle, tried
        else:
            low = middle
    return high, ends


def _max_samples(length: int, cost: float, cap: int, limit: float, num_samples: int) -> int:
    """Return the maximum number of samples in a micro-batch whose longest sample has the given length and cost."""
    maximum = cap // length if length else num_samples
    if limit < math.inf and cost:
        maximum = min(maximum, int(limit / cost))
    return min(max(maximum, 1), num_samples)


def cheapest_split(
    lengths: Sequence[int], costs: Sequence[float], cap: int, fixed: float, limit: float = math.inf
) -> tuple[list[int], float]:
    """Return the ends of the micro-batches in the cheapest split of samples sorted by length, and its cost.

    As a recursion: `best[j] = min(best[i] + fixed + (j - i) costs[j - 1])` over all i for which samples i to j - 1
    are within cap and limit. `lengths` (padded) and `costs` (of each sample) are in ascending order. `cap` limits the
    tokens of a micro-batch and `limit` its cost without `fixed`; a single sample may exceed either limit.
    """
    num_samples = len(lengths)
    best, begins = [0.0] + [math.inf] * num_samples, [0] * (num_samples + 1)
    start = 0
    while start < num_samples:
        length, cost = lengths[start], costs[start]
        stop = start + 1
        while stop < num_samples and lengths[stop] == length:
            stop += 1
        maximum = _max_samples(length, cost, cap, limit, num_samples)
        full_cost = fixed + maximum * cost
        # Inside a run of equal lengths only full micro-batches end.
        for end in range(max(start + 1, maximum), stop):
            best[end], begins[end] = best[end - maximum] + full_cost, end - maximum
        lowest, begin = min((best[i] - i * cost, i) for i in range(max(0, stop - maximum), stop))
        best[stop], begins[stop] = lowest + fixed + stop * cost, begin
        start = stop
    ends, end = [], num_samples
    while end:
        ends.append(end)
        end = begins[end]
    return ends[::-1], best[num_samples]


def _packed_cuts(
    occupied: Sequence[int],
    costs: Sequence[float],
    cap: int,
    num_ranks: int,
) -> list[Cuts]:
    """Return the best-fit packing and packings with more even costs; if there are several ranks, also in more bins."""
    fewest = _best_fit(occupied, cap)
    splits = [fewest]
    costliest_first = sorted(range(len(occupied)), key=lambda index: (-costs[index], index))
    sizes = {len(fewest)}
    if num_ranks > 1:
        sizes |= {ceil_div(len(fewest), num_ranks) * num_ranks, (ceil_div(len(fewest), num_ranks) + 1) * num_ranks}
    for num_bins in sorted(sizes):
        even = _even_bins(costliest_first, occupied, costs, cap, min(num_bins, len(occupied)))
        if even is not None:
            splits.append(even)
    return splits


def _best_fit(occupied: Sequence[int], cap: int) -> Cuts:
    """Pack samples, the longest first, each into the fullest bin that has room for it."""
    bins: Cuts = []
    rooms: list[tuple[int, int]] = []  # free tokens of each bin and its index, in ascending order
    for sample in sorted(range(len(occupied)), key=lambda index: (-occupied[index], index)):
        length = occupied[sample]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            bins.append([sample])
            insort(rooms, (cap - length, len(bins) - 1))
        else:
            room, number = rooms.pop(at)
            bins[number].append(sample)
            insort(rooms, (room - length, number))
    return bins


def _even_bins(
    costliest_first: Sequence[int], occupied: Sequence[int], costs: Sequence[float], cap: int, num_bins: int
) -> Cuts | None:
    """Put each sample into the bin with the lowest cost that has room for it; return None if a sample does not fit."""
    bins: Cuts = [[] for _ in range(num_bins)]
    heap = [(0.0, number, cap) for number in range(num_bins)]
    for sample in costliest_first:
        too_full = []
        while heap and heap[0][2] < occupied[sample] and bins[heap[0][1]]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, number, room = heapq.heappop(heap)
        bins[number].append(sample)
        heapq.heappush(heap, (cost + costs[sample], number, room - occupied[sample]))
        for entry in too_full:
            heapq.heappush(heap, entry)
    return [samples for samples in bins if samples]


def _deal(units: Cuts, unit_costs: Sequence[float], world_size: int, *, lockstep: bool) -> tuple[list[Cuts], float]:
    """Assign units to ranks, the most expensive first; return the units and the cost of the slowest rank."""
    shares: list[Cuts] = [[] for _ in range(world_size)]
    share_costs: list[list[float]] = [[] for _ in range(world_size)]
    heap = [(0.0, rank) for rank in range(world_size)]
    for number in sorted(range(len(units)), key=lambda number: (-unit_costs[number], number)):
        cost, rank = heap[0]
        shares[rank].append(sorted(units[number]))
        share_costs[rank].append(unit_costs[number])
        heapq.heapreplace(heap, (cost + unit_costs[number], rank))
    if lockstep:
        # Ranks wait for each other in each unit, so the k-th units take as long as the longest of them.
        return shares, sum(max(column) for column in itertools.zip_longest(*share_costs, fillvalue=0.0))
    return shares, max(sum(costs) for costs in share_costs)


def _unit_cost(unit: Sequence[int], costs: Sequence[float], *, packed: bool) -> float:
    sample_costs = [costs[index] for index in unit]
    return sum(sample_costs) if packed else len(unit) * max(sample_costs)
