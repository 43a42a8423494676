"""A step over a long sample, from steps over short ones: for models that take their tokens one after the other.

Such a model runs the same operations for each token, in loops, so that a step over 2,048 tokens is one over 8 in which
each loop has 2,040 turns more. Where they stand is seen by comparing two lengths. What a turn takes and leaves is a
polynomial in the length, of degree two at most: three lengths give it, and a fourth, much longer one is compared, entry
by entry. Memory within the further turns is highest in the first or the last of them, as it grows by the same from one
to the next, and the turns before and after them are there and hold the same; so only what they leave is added.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import torch
from jaxtyping import Int64

from anybatch.core.geometry import ceil_div
from anybatch.errors import PlanError
from anybatch.memory.trace import Allocation, MemoryEnvelope, MemoryTrace, Polynomials, in_order
from anybatch.planner.cost.step_time import CostTrace, Operation

Numbers = Int64[torch.Tensor, "entry number"]
_LEAST_TURNS = 3
"""A loop has that many turns at least."""
_MOST_OFF = 0.01
_MOST_PIECES = 200_000


@dataclass(frozen=True, slots=True)
class Entries:
    """What happened in a step over samples of one length, in order.

    Attributes:
        names: what each entry is, whatever its size.
        numbers: int64 (entries, numbers of each): its sizes.
    """

    names: Sequence[Hashable]
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over tokens: a step over more of them has further turns before entry `at`, of `period` entries each.

    The last `period` entries before are such a turn.
    """

    at: int
    period: int


@dataclass(frozen=True, slots=True, eq=False)
class Lengthened:
    """Entries of a step at any length: those at the shortest, with further turns in its loops. Made by `lengthen`.

    A length is given as the number of further turns.
    """

    loops: tuple[Loop, ...]
    shortest: Entries
    rise: Numbers
    curvature: Numbers

    def numbers(self, turns: int) -> Numbers:
        """Return the sizes of the entries of the shortest step where each loop has so many turns more."""
        # As in `Polynomials`, in a basis in which nothing is ever rounded.
        return self.shortest.numbers + self.rise * turns + self.curvature * (turns * (turns - 1) // 2)

    def found(self, entries: Entries, turns: int) -> Numbers:
        """Return the sizes of the entries of the shortest step in a step over a longer sample.

        Raises:
            PlanError: it did something else, or turns of a loop differ from each other.
        """
        return _without_turns(entries, self.shortest, self.loops, turns)


def lengthen(found: Sequence[Entries]) -> Lengthened:
    """Return the entries at any length, from those with 0, 1 and 2 turns more in each loop.

    Raises:
        PlanError: the steps differ in more than turns of loops.
    """
    first, second, _ = found
    loops = tuple(_loops(first.names, second))
    at = [_without_turns(one, first, loops, turns) for turns, one in enumerate(found)]
    return Lengthened(loops, first, at[1] - at[0], at[2] - 2 * at[1] + at[0])


def _loops(shorter: Sequence[Hashable], longer: Entries) -> list[Loop]:
    """Return the loops that have one turn more in one of two steps.

    Raises:
        PlanError: they differ in something else, or a loop has too few turns to be one.
    """
    found, names, here, there = list[Loop](), longer.names, 0, 0
    sized = list(zip(names, map(tuple, longer.numbers.tolist()), strict=True))
    while True:
        same = _num_same(shorter, here, names, there)
        here, there = here + same, there + same
        if here == len(shorter) and there == len(names):
            return found
        # Where a turn begins like what follows the loop, steps part later, and the turn that is more is a rotated one.
        most = len(names) - there - (len(shorter) - here)
        turns = [(period, back) for period in range(1, most + 1) if (back := _back(sized, there, period))]
        if not turns:
            message = f"steps over two lengths differ in more than turns of a loop, first before entry {here}."
            raise PlanError(message)
        period, back = max(turns, key=lambda turn: _num_same(shorter, here, names, there + turn[0]))
        # In the middle, so that whole turns stand on both sides.
        found.append(Loop(here - (back - period) // 2, period))
        there += period


def _num_same(some: Sequence[Hashable], begin: int, others: Sequence[Hashable], other_begin: int) -> int:
    """Return how many entries agree, from two places on."""
    most = min(len(some) - begin, len(others) - other_begin)
    return next((at for at in range(most) if some[begin + at] != others[other_begin + at]), most)


def _back(sized: Sequence[Hashable], end: int, period: int) -> int:
    """Return how many entries before one, and of the period after it, are as those a period later; 0 for too few."""
    back = 0
    while back < end and sized[end - back - 1] == sized[end - back - 1 + period]:
        back += 1
    return back if back >= _LEAST_TURNS * period else 0


def _without_turns(found: Entries, shortest: Entries, loops: Sequence[Loop], turns: int) -> Numbers:
    """Return the sizes of the entries of a step without the further turns of its loops, each of which is compared.

    Raises:
        PlanError: it is not the shortest with so many turns more, or turns differ from each other.
    """
    names, kept, begin = list[Hashable](), list[int](), 0
    for loop in (*loops, Loop(len(shortest.names), 0)):
        names += shortest.names[begin : loop.at]
        kept += range(len(names) - (loop.at - begin), len(names))
        place, length = len(names), loop.period * turns
        names += list(shortest.names[loop.at - loop.period : loop.at]) * turns
        # Each turn, and the one after them, is as the one before.
        around = found.numbers[place - loop.period : place + length + loop.period]
        if not torch.equal(around[: len(around) - loop.period], around[loop.period :]):
            message = "turns of a loop over tokens take different memory or work."
            raise PlanError(message)
        begin = loop.at
    if names != list(found.names):
        message = "a step over a longer sample has more than further turns in its loops."
        raise PlanError(message)
    return found.numbers[kept]


def entries_of_memory(trace: MemoryTrace, sizes: Sequence[Int64[torch.Tensor, " allocation"]]) -> Entries:
    """Return the allocations and frees of a step, in order.

    Args:
        trace: the step, in order.
        sizes: of each allocation: bytes, or the coefficients of a polynomial.
    """
    names = [(event > 0, *_kind(trace.allocations[abs(event) - 1])) for event in trace.events]
    numbers = torch.tensor(trace.events, dtype=torch.int64).abs() - 1
    return Entries(names, torch.stack(list(sizes), dim=1)[numbers])


def coefficients(envelope: MemoryEnvelope) -> Entries:
    """Return the entries of a step at any micro-batch size."""
    sizes = envelope.allocated
    return entries_of_memory(envelope.trace, (sizes.constant, sizes.slope, sizes.curvature))


def memory_at(shortest: MemoryEnvelope, lengthened: Lengthened, turns: int) -> MemoryEnvelope:
    """Return the memory of a step with so many turns more in each loop.

    Each leaves its pieces, or frees those of a turn before. Where these are very many, several leave one together:
    the sum is the same, and only what an allocator makes of it may differ.

    Args:
        shortest: the memory without them.
        lengthened: of its entries.
        turns: further turns.

    Raises:
        PlanError: a loop frees what none has left.
    """
    trace, rows = shortest.trace, [tuple(row) for row in lengthened.numbers(turns).tolist()]
    changes = {loop.at: _left_by(loop, trace, rows) for loop in lengthened.loops}
    num_left = sum(count for one in changes.values() for count in one.values() if count > 0)
    together = max(1, ceil_div(num_left * turns, _MOST_PIECES))
    bundles = [together] * (turns // together) + [turns % together] * (turns % together > 0)
    step, places = _Step(), list[int]()
    for position, event in enumerate((*trace.events, 0)):
        # What is freed first: turns take over memory from those before.
        for (piece, row), count in sorted(changes.get(position, {}).items(), key=itemgetter(1)):
            for _ in range(abs(count)):
                for size in bundles if count > 0 else reversed(bundles):
                    step.add((piece, row), piece, tuple(size * one for one in row), taken=count > 0)
        places.append(len(step.events))
        if event:
            step.add(abs(event), trace.allocations[abs(event) - 1], rows[position], taken=event > 0)
    marks = tuple((places[position], name) for position, name in trace.marks)
    made = replace(shortest, trace=MemoryTrace(tuple(step.pieces), tuple(step.events), marks))
    found = made.with_sizes(Polynomials(*torch.tensor(step.rows, dtype=torch.int64).reshape(-1, 3).unbind(1)))
    return replace(found, trace=found.at(found.traced[0]))


def _left_by(
    loop: Loop, trace: MemoryTrace, rows: Sequence[tuple[int, ...]]
) -> Counter[tuple[Allocation, tuple[int, ...]]]:
    """Return how many pieces more there are after a turn than before, by what they are and their sizes."""
    found = Counter[tuple[Allocation, tuple[int, ...]]]()
    for place in range(loop.at - loop.period, loop.at):
        event = trace.events[place]
        found[replace(trace.allocations[abs(event) - 1], num_bytes=0), rows[place]] += 1 if event > 0 else -1
    return found


@dataclass(slots=True)
class _Step:
    """Allocations and frees, as they come."""

    pieces: list[Allocation] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    _held: dict[Hashable, list[int]] = field(default_factory=dict)

    def add(self, key: Hashable, piece: Allocation, row: tuple[int, ...], *, taken: bool) -> None:
        """Take a piece of memory, or free the last one of the same key.

        Raises:
            PlanError: there is none, or it has another size.
        """
        if taken:
            self.pieces.append(piece)
            self.rows.append(row)
            self.events.append(len(self.pieces))
            self._held.setdefault(key, []).append(len(self.pieces))
        else:
            held = self._held.get(key)
            if not held or self.rows[held[-1] - 1] != row:
                message = "a loop over tokens frees what no loop has left."
                raise PlanError(message)
            self.events.append(-held.pop())


def check_memory(shortest: MemoryEnvelope, lengthened: Lengthened, turns: int, trace: MemoryTrace, m: int) -> None:
    """Compare with the trace of a step over a length, at micro-batch size `m`: each entry, and the peak.

    Raises:
        PlanError: something of it is otherwise.
    """
    found = in_order(trace)
    sizes = torch.tensor([one.num_bytes for one in found.allocations], dtype=torch.int64)
    at_m = Polynomials(*lengthened.numbers(turns).unbind(1)).at(m)
    entries = entries_of_memory(found, [sizes])
    there = lengthened.found(entries, turns)[:, 0]
    if not torch.equal(there, at_m) or memory_at(shortest, lengthened, turns).peak_bytes(m) != found.peak_bytes:
        message = "what a step holds is no quadratic in the number of tokens."
        raise PlanError(message)


def _kind(one: Allocation) -> tuple[Hashable, ...]:
    return one.operation, one.phase, one.category, one.pool


def entries_of_costs(costs: CostTrace) -> Entries:
    """Return the operations of a step, in order."""
    most = max((len(one.dims) for one in costs.operations), default=0)
    rows = [
        (one.num_tensors, one.flops, one.bytes_read, one.bytes_written, *one.dims, *(0,) * (most - len(one.dims)))
        for one in costs.operations
    ]
    names = [(one.name, one.kind, one.phase, one.micro_batch, one.dtype, len(one.dims)) for one in costs.operations]
    return Entries(names, torch.tensor(rows, dtype=torch.int64).reshape(-1, 4 + most))


def check_costs(shortest: CostTrace, lengthened: Lengthened, turns: int, costs: CostTrace) -> None:
    """Compare with the operations of a step over a length: which they are, and the work of all of them.

    It is the sums that are compared: a look-up in a small table reads no more than all of it, however many tokens.

    Raises:
        PlanError: they are others, or the work is off by more than 1%.
    """
    entries = entries_of_costs(costs)
    lengthened.found(entries, turns)
    worked_out = entries_of_costs(costs_at(shortest, lengthened, turns))
    sums = [one.numbers[:, :4].sum(0) for one in (worked_out, entries)]
    if bool(((sums[0] - sums[1]).abs() > _MOST_OFF * sums[1]).any()):
        message = "the work of a step is no quadratic in the number of tokens."
        raise PlanError(message)


def costs_at(shortest: CostTrace, lengthened: Lengthened, turns: int) -> CostTrace:
    """Return the operations of a step with so many turns more in each loop; those of all of them are one operation.

    Args:
        shortest: the operations without them.
        lengthened: of its entries.
        turns: further turns.
    """
    rows = lengthened.numbers(turns).tolist()
    there = [_resized(one, row, 1) for one, row in zip(shortest.operations, rows, strict=True)]
    found, begin = list[Operation](), 0
    for loop in lengthened.loops:
        found += there[begin : loop.at]
        again = slice(loop.at - loop.period, loop.at)
        found += [_resized(one, row, turns) for one, row in zip(shortest.operations[again], rows[again], strict=True)]
        begin = loop.at
    return CostTrace((*found, *there[begin:]))


def _resized(one: Operation, row: Sequence[int], times: int) -> Operation:
    # An operation that is run so many times takes as long as one on so many tensors, one after the other.
    num_tensors, flops, read, written = (times * number for number in row[:4])
    return replace(
        one,
        num_tensors=num_tensors,
        flops=flops,
        bytes_read=read,
        bytes_written=written,
        dims=tuple(row[4 : 4 + len(one.dims)]),
    )
