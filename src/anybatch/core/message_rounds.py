"""Chapter 22: who sends to whom, and when, so that N ranks sum or gather in about log2 N messages one after another.

A ring passes a message on from neighbour to neighbour, and needs about N of them. Here the number of ranks that a rank
has heard from, directly or not, doubles with every round.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (recursive
doubling, with ranks beyond a power of two folded in; Bruck's all-gather, of Bruck et al. 1997).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SumRound:
    """What a rank does in one round of a sum.

    Attributes:
        partner: the rank that it talks to.
        sends: whether it sends what it has summed so far.
        receives: what comes: a part, which it adds to its own; the sum of all, which it takes; or nothing.
    """

    partner: int
    sends: bool
    receives: Literal["part", "sum", "nothing"]


@dataclass(frozen=True, slots=True)
class GatherRound:
    """What a rank does in one round of a gather, where row i is that of the i-th rank after it, and row 0 its own.

    Attributes:
        to_rank: gets its first rows.
        from_rank: whose first rows it gets.
        num_rows: how many.
        first_row: the place of those that it gets.
    """

    to_rank: int
    from_rank: int
    num_rows: int
    first_row: int


def sum_rounds(rank: int, num_ranks: int) -> tuple[SumRound, ...]:
    """Return the rounds of a rank in a sum by recursive doubling.

    With p the largest power of two up to N, rank p + i gives its numbers to rank i before and gets the sum after. In
    round k of the first p ranks those whose numbers differ in bit k alone exchange what they have, and add it.

    All ranks get the same bits: partners add the same two numbers, whose order does not matter (IEEE 754), so that
    after each round all ranks of a block of 2^k have the same. The order depends on N alone.
    """
    most = 1 << (num_ranks.bit_length() - 1)
    if rank >= most:
        own = rank - most
        return SumRound(own, sends=True, receives="nothing"), SumRound(own, sends=False, receives="sum")
    doubling = [SumRound(rank ^ (1 << bit), sends=True, receives="part") for bit in range(most.bit_length() - 1)]
    folded = rank + most
    if folded >= num_ranks:
        return tuple(doubling)
    first = SumRound(folded, sends=False, receives="part")
    return first, *doubling, SumRound(folded, sends=True, receives="nothing")


def gather_rounds(rank: int, num_ranks: int) -> tuple[GatherRound, ...]:
    """Return the rounds of a rank in a gather, for any N: in round k it gets up to 2^k rows, those after its own 2^k.

    Every row but its own comes once: N - 1 rows, the least that is possible.
    """
    return tuple(
        GatherRound(
            (rank - known) % num_ranks, (rank + known) % num_ranks, min(known, num_ranks - known), first_row=known
        )
        for known in (1 << bit for bit in range((num_ranks - 1).bit_length()))
    )


def most_sum_rounds(num_ranks: int) -> int:
    """Return the rounds of a sum one after another: `floor(log2 N)`, and two more where N is no power of two."""
    doublings = num_ranks.bit_length() - 1
    return doublings if num_ranks == 1 << doublings else doublings + 2


def sum_messages(num_ranks: int) -> int:
    """Return the messages of all ranks in a sum: `p log2 p + 2 (N - p)`."""
    doublings = num_ranks.bit_length() - 1
    most = 1 << doublings
    return most * doublings + 2 * (num_ranks - most)


def gather_messages(num_ranks: int) -> int:
    """Return the messages of all ranks in a gather: `N ceil(log2 N)`."""
    return num_ranks * (num_ranks - 1).bit_length()
