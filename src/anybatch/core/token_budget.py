"""Cut an effective batch by length, so that its step is fastest under a cap on tokens.

The gradient does not depend on the cut, so the fastest cut may be used. The cost of a padded micro-batch of n samples,
the longest of L tokens, which occupies `n L` tokens, is modelled as

    fixed + n h(L)        with h(L) = L, or a user function that does not fall with L

in the time of one token. Under a cap on `n L`, some cheapest cut takes the samples sorted by length: move the longer
samples of any two micro-batches to the one with the longest sample, keep both sizes, and neither maximum rises. In
sorted order, the cheapest cut is a shortest path, found here exactly. A micro-batch that ends between two samples of
one length is full: otherwise the next of these samples could move over at no extra cost. So each run of equal lengths
has one candidate, and the search is short: `n + sum over distinct lengths of cap / L` steps, 20 ms for 16,384 samples.

Packed micro-batches have no padding: samples are concatenated, so fewer micro-batches are cheaper.

The slowest rank sets the time of a step. Finer cuts cost more in total but can be dealt more evenly, so a few are
compared: each is dealt heaviest micro-batch first, always to the rank with the smallest load (Graham 1969).
"""

import dataclasses
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anybatch.core.geometry import ceil_div, checked_int, is_number, refuse_unless
from anybatch.core.splitting import BatchPlan, Cut, Unit, plan_of
from anybatch.errors import BatchSizeError, UserError

FIXED_TOKENS = 256.0
"""Default fixed cost of a micro-batch (launch and tail), in tokens, without a measurement."""
_MORE_PER_RANK = 4
"""Maximum number of extra micro-batches per rank that are tried, so that ranks finish together."""
_HALVINGS = 20
Cuts = list[list[int]]
"""Positions in the effective batch, by micro-batch."""


Shape = tuple[int, int]
"""Rows and columns of a micro-batch: its samples, and the tokens that each is padded to."""


def shape_for(shapes: Sequence[Shape], num_samples: int, longest: int) -> Shape:
    """Return the smallest shape (samples, padded tokens) with room for a micro-batch, or raise a `BatchSizeError`."""
    with_room = [shape for shape in shapes if shape[0] >= num_samples and shape[1] >= longest]
    if not with_room:
        message = f"no shape of {list(shapes)} has room for {num_samples} x {longest} tokens. Add a larger one."
        raise BatchSizeError(message, code="no_shape")
    return min(with_room, key=lambda shape: (shape[0] * shape[1], shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """Lengths of the samples of an effective batch, and their layout in a micro-batch.

    With `either` the collate function can both pad and pack, and `in_layout` chooses. Padded lengths are rounded up to
    a multiple of `multiple_of`, or to one of the `shapes` (rows, tokens), if there are any.
    """

    tokens: Sequence[int]
    packed: bool = False
    either: bool = False
    multiple_of: int = 1
    shapes: Sequence[Shape] = ()

    @property
    def laid_out(self) -> list[int]:
        """Tokens that each sample occupies alone in a micro-batch."""
        if self.shapes:
            return [shape_for(self.shapes, 1, length)[1] for length in self.tokens]
        if self.packed or self.multiple_of == 1:
            return list(self.tokens)
        return [ceil_div(length, self.multiple_of) * self.multiple_of for length in self.tokens]

    def in_layout(self, *, packed: bool) -> "SampleLengths":
        """Return the same lengths, padded or packed, if the collate function can do both."""
        return dataclasses.replace(self, packed=packed, either=False) if self.either else self


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Maximum tokens of one micro-batch, and the cost of tokens; made by `token_budget`.

    `cut_at` is the number of tokens that batches are cut at now, fewer than `tokens` after an out-of-memory error.
    """

    tokens: int
    fixed_tokens: float | None = None
    sample_cost: Callable[[int], float] | None = field(default=None, hash=False)
    longer: Literal["error", "alone"] = "error"
    cut_at: int | None = None

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
    """Return a budget for `Engine(micro_batch_size=...)`: micro-batches limited by tokens instead of samples.

    The engine then cuts an effective batch by length, for speed, and deals it to ranks by cost. The samples of a step
    and its gradient do not change. Lengths come with the data: `ab.batches(dataset, lengths=..., collate=...)`. A
    "token" is the unit of the lengths: pixels, frames, seconds of audio.

    Args:
        tokens: maximum tokens of a micro-batch, padding included, limited by memory.
        fixed_tokens: fixed cost of a micro-batch, in tokens. Larger values give fewer micro-batches with more padding.
            None: measured on the first batch if a step is long enough, otherwise 256.
        sample_cost: from a sample's padded length to its cost in tokens, never falling; None: the length. For attention
            over samples of thousands of tokens use, say, `lambda length: length * (1 + length / 6_000)`.
        longer: "error" refuses a batch with a sample longer than the budget; "alone" gives such a sample its own
            micro-batch, regardless of its memory.

    Raises:
        BatchSizeError: `tokens` is not a whole number of at least 1.
        UserError: another value that cannot be used.
    """
    checked_int("tokens", tokens, error=BatchSizeError)
    is_valid = fixed_tokens is None or (is_number(fixed_tokens) and fixed_tokens >= 0)
    refuse_unless(is_valid, "fixed_tokens", fixed_tokens, "a number of tokens of at least 0, or None")
    is_valid = sample_cost is None or callable(sample_cost)
    refuse_unless(is_valid, "sample_cost", sample_cost, "a function of a length, or None")
    if longer not in ("error", "alone"):
        message = f"{longer=} must be 'error' or 'alone'. To shorten samples, give the collate function a `longest`."
        raise UserError(message, code="unknown_option")
    fixed = None if fixed_tokens is None else float(fixed_tokens)
    return TokenBudget(tokens=tokens, fixed_tokens=fixed, sample_cost=sample_cost, longer=longer)


def plan_by_length(lengths: SampleLengths, world_size: int, cut: Cut, budget: TokenBudget) -> BatchPlan:
    """Cut an effective batch by length and deal it to ranks by cost, each rank's heaviest micro-batch first.

    Of `cut`, only `deal` ("balanced" cuts for all ranks, "fixed" as for one) and `lockstep` are used.

    Raises:
        BatchSizeError: a sample is longer than the budget.
        UserError: costs fall as lengths rise, or are not numbers.
    """
    laid_out = lengths.laid_out
    _refuse_longer(lengths, laid_out, budget)
    costs = _costs(laid_out, budget)
    cap = budget.tokens if budget.cut_at is None else budget.cut_at
    fixed = FIXED_TOKENS if budget.fixed_tokens is None else budget.fixed_tokens
    num_targets = world_size if cut.deal == "balanced" else 1
    if lengths.shapes:
        found = [_shaped_cut(lengths, budget, cap, fixed)]
    elif lengths.packed:
        found = _packed_cuts(laid_out, costs, cap, num_targets)
    else:
        found = _padded_cuts(laid_out, costs, cap, fixed, num_targets)
    dealt: list[tuple[float, int, list[Cuts]]] = []
    for number, units in enumerate(found):
        weights = [fixed + _weight(unit, costs, packed=lengths.packed) for unit in units]
        shares, cost = _deal(units, weights, world_size, lockstep=cut.lockstep)
        dealt.append((cost, number, shares))
    _, _, shares = min(dealt, key=lambda found: found[:2])  # among equally fast cuts the coarsest, which comes first
    order = [position for share in shares for unit in share for position in unit]
    ends = list(itertools.accumulate((len(unit) for share in shares for unit in share), initial=0))
    numbered = iter(Unit(number, *bounds) for number, bounds in enumerate(itertools.pairwise(ends)))
    plan = plan_of(len(laid_out), tuple(tuple(next(numbered) for _ in share) for share in shares), cut)
    return plan.in_order(order)


def _refuse_longer(lengths: SampleLengths, laid_out: Sequence[int], budget: TokenBudget) -> None:
    if budget.longer == "alone":
        return
    longest = max(range(len(laid_out)), key=laid_out.__getitem__, default=None)
    if longest is not None and laid_out[longest] > budget.tokens:
        padded = f" ({laid_out[longest]:,} padded)" if laid_out[longest] != lengths.tokens[longest] else ""
        message = (
            f"sample {longest} of the effective batch has {lengths.tokens[longest]:,} tokens{padded}, and a "
            f"micro-batch may hold {budget.tokens:,}. Raise the budget; run each such sample alone in a micro-batch, "
            "token_budget(..., longer='alone'), if memory has room for it; or shorten them, "
            "anybatch.data.Padded(longest=...)."
        )
        raise BatchSizeError(message, code="sample_too_long")


def _costs(laid_out: Sequence[int], budget: TokenBudget) -> list[float]:
    """Return the cost of each sample at its own length, in tokens."""
    by_length = {length: budget.cost(length) for length in set(laid_out)}
    for shorter, longer in itertools.pairwise(sorted(by_length)):
        if not 0 <= by_length[shorter] <= by_length[longer] < math.inf:
            message = (
                f"sample_cost must not fall as samples get longer: it is {by_length[shorter]} for {shorter} tokens and "
                f"{by_length[longer]} for {longer}."
            )
            raise UserError(message, code="falling_cost")
    return [by_length[length] for length in laid_out]


def _padded_cuts(laid_out: Sequence[int], costs: Sequence[float], cap: int, fixed: float, num_ranks: int) -> list[Cuts]:
    """Return the cheapest cut, and for several ranks the cheapest cuts under lower limits per micro-batch."""
    order = sorted(range(len(laid_out)), key=laid_out.__getitem__)
    lengths, by_length = [laid_out[place] for place in order], [costs[place] for place in order]
    found = [cheapest_cut(lengths, by_length, cap, fixed)[0]]
    if num_ranks > 1 and lengths:
        least = ceil_div(len(fewest_units(lengths, by_length, cap)), num_ranks)
        for per_rank in range(least, least + _MORE_PER_RANK):
            limit, ends = _evenest(lengths, by_length, cap, per_rank * num_ranks)
            found += [ends, cheapest_cut(lengths, by_length, cap, fixed, limit)[0]]
    return [[order[start:stop] for start, stop in itertools.pairwise([0, *ends])] for ends in found]


def fewest_units(lengths: Sequence[int], costs: Sequence[float], cap: int, limit: float = math.inf) -> list[int]:
    """Return the ends of the micro-batches in a cut into the fewest, filled from the longest samples down.

    `lengths` (padded) and `costs` (of a sample of each length) rise. `cap` limits the tokens of a micro-batch and
    `limit` its cost; a single sample may exceed either.
    """
    ends, end = [], len(lengths)
    while end:
        ends.append(end)
        end -= min(end, _most(lengths[end - 1], costs[end - 1], cap, limit, end))
    return ends[::-1]


def _evenest(lengths: Sequence[int], costs: Sequence[float], cap: int, num_units: int) -> tuple[float, list[int]]:
    """Return nearly the lowest limit under which `num_units` micro-batches suffice, and their ends."""
    low, high = costs[-1], costs[-1] * len(costs)
    ends = fewest_units(lengths, costs, cap, high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = fewest_units(lengths, costs, cap, middle)
        if len(tried) <= num_units:
            high, ends = middle, tried
        else:
            low = middle
    return high, ends


def _most(length: int, cost: float, cap: int, limit: float, num_samples: int) -> int:
    """Return the maximum samples of a micro-batch whose longest sample has this length and cost."""
    most = cap // length if length else num_samples
    if limit < math.inf and cost:
        most = min(most, int(limit / cost))
    return min(max(most, 1), num_samples)


def cheapest_cut(
    lengths: Sequence[int], costs: Sequence[float], cap: int, fixed: float, limit: float = math.inf
) -> tuple[list[int], float]:
    """Return the ends of the micro-batches in the cheapest cut of samples sorted by length, and its cost.

    The plain search: `best[j] = min(best[i] + fixed + (j - i) costs[j - 1])` over all i for which samples i to j - 1
    are within cap and limit. `lengths` (padded) and `costs` (of a sample of each length) rise. `cap` limits the tokens
    of a micro-batch and `limit` its cost without `fixed`; a single sample may exceed either.
    """
    num_samples = len(lengths)
    best, begins = [0.0] + [math.inf] * num_samples, [0] * (num_samples + 1)
    start = 0
    while start < num_samples:
        length, cost = lengths[start], costs[start]
        stop = start + 1
        while stop < num_samples and lengths[stop] == length:
            stop += 1
        most = _most(length, cost, cap, limit, num_samples)
        full = fixed + most * cost
        # Within a run of equal lengths only full micro-batches end.
        for end in range(max(start + 1, most), stop):
            best[end], begins[end] = best[end - most] + full, end - most
        least, begin = min((best[i] - i * cost, i) for i in range(max(0, stop - most), stop))
        best[stop], begins[stop] = least + fixed + stop * cost, begin
        start = stop
    ends, end = [], num_samples
    while end:
        ends.append(end)
        end = begins[end]
    return ends[::-1], best[num_samples]


def _shaped_cut(lengths: SampleLengths, budget: TokenBudget, cap: int, fixed: float) -> Cuts:
    """Return the cheapest cut whose micro-batches are padded, also in rows, to one of a few shapes.

    A shape has the same cost however full it is, so a micro-batch takes the maximum number of samples for its shape,
    unless a smaller shape is as good.
    """
    order = sorted(range(len(lengths.tokens)), key=lengths.tokens.__getitem__)
    shapes = [shape for shape in lengths.shapes if shape[0] * shape[1] <= cap or shape[0] == 1]
    costs = {shape: fixed + shape[0] * budget.cost(shape[1]) for shape in shapes}
    best, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths.tokens[order[end - 1]]
        with_room = [shape for shape in shapes if shape[1] >= longest]
        if not with_room:
            message = (
                f"no shape of {list(lengths.shapes)} has room for a sample of {longest:,} tokens within {cap:,} tokens "
                "a micro-batch. Add one of a single row, or raise the budget."
            )
            raise BatchSizeError(message, code="no_shape")
        least, begin = min((best[max(0, end - shape[0])] + costs[shape], max(0, end - shape[0])) for shape in with_room)
        best.append(least)
        begins.append(begin)
    units, end = [], len(order)
    while end:
        units.append(order[begins[end] : end])
        end = begins[end]
    return units


def _packed_cuts(
    laid_out: Sequence[int],
    costs: Sequence[float],
    cap: int,
    num_ranks: int,
) -> list[Cuts]:
    """Return the fewest bins that the longest-first rule finds, and for several ranks a few finer divisions."""
    fewest = _best_fit(laid_out, cap)
    found = [fewest]
    heaviest_first = sorted(range(len(laid_out)), key=lambda place: (-costs[place], place))
    wanted = {len(fewest)}
    if num_ranks > 1:
        wanted |= {ceil_div(len(fewest), num_ranks) * num_ranks, (ceil_div(len(fewest), num_ranks) + 1) * num_ranks}
    for num_bins in sorted(wanted):
        even = _even_bins(heaviest_first, laid_out, costs, cap, min(num_bins, len(laid_out)))
        if even is not None:
            found.append(even)
    return found


def _best_fit(laid_out: Sequence[int], cap: int) -> Cuts:
    """Pack samples, the longest first, each into the fullest bin that has room for it."""
    bins: Cuts = []
    rooms: list[tuple[int, int]] = []  # sorted: free tokens of a bin, and its index
    for place in sorted(range(len(laid_out)), key=lambda place: (-laid_out[place], place)):
        length = laid_out[place]
        found = bisect_left(rooms, (length, -1))
        if found == len(rooms):
            bins.append([place])
            insort(rooms, (cap - length, len(bins) - 1))
        else:
            room, number = rooms.pop(found)
            bins[number].append(place)
            insort(rooms, (room - length, number))
    return bins


def _even_bins(
    heaviest_first: Sequence[int], laid_out: Sequence[int], costs: Sequence[float], cap: int, num_bins: int
) -> Cuts | None:
    """Put each sample into the lightest bin with room for it; return None if a sample does not fit."""
    bins: Cuts = [[] for _ in range(num_bins)]
    heap = [(0.0, number, cap) for number in range(num_bins)]
    for place in heaviest_first:
        passed = []
        while heap and heap[0][2] < laid_out[place] and bins[heap[0][1]]:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        load, number, room = heapq.heappop(heap)
        bins[number].append(place)
        heapq.heappush(heap, (load + costs[place], number, room - laid_out[place]))
        for kept in passed:
            heapq.heappush(heap, kept)
    return [one for one in bins if one]


def _deal(units: Cuts, weights: Sequence[float], world_size: int, *, lockstep: bool) -> tuple[list[Cuts], float]:
    """Deal micro-batches to ranks, the heaviest first; return the shares and the cost of the slowest rank."""
    shares: list[Cuts] = [[] for _ in range(world_size)]
    loads: list[list[float]] = [[] for _ in range(world_size)]
    heap = [(0.0, rank) for rank in range(world_size)]
    for number in sorted(range(len(units)), key=lambda number: (-weights[number], number)):
        load, rank = heap[0]
        shares[rank].append(sorted(units[number]))
        loads[rank].append(weights[number])
        heapq.heapreplace(heap, (load + weights[number], rank))
    if lockstep:
        # Ranks wait for each other in each micro-batch: the k-th takes as long as its longest.
        return shares, sum(max(column) for column in itertools.zip_longest(*loads, fillvalue=0.0))
    return shares, max(sum(load) for load in loads)


def _weight(unit: Sequence[int], costs: Sequence[float], *, packed: bool) -> float:
    of_samples = [costs[place] for place in unit]
    return sum(of_samples) if packed else len(unit) * max(of_samples)
