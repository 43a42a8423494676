"""Chapter 22: message schedules with which N ranks sum or gather in about log2 N rounds.

A ring passes a message from neighbour to neighbour, which takes about N rounds. Here each round doubles the number of
ranks whose data a rank has received, directly or indirectly.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (recursive
doubling, with ranks beyond a power of two folded in; Bruck's all-gather, of Bruck et al. 1997).
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SumRound:
    """A rank's messages in one round of a sum.

    Attributes:
        partner: the rank to exchange with.
        sends: whether this rank sends its sum so far.
        receives: the incoming data: a part, to add to its own; the total, to replace it; or nothing.
    """

    partner: int
    sends: bool
    receives: Literal["part", "sum", "nothing"]


@dataclass(frozen=True, slots=True)
class GatherRound:
    """A rank's messages in one round of a gather, where row i belongs to the i-th rank after it, and row 0 to itself.

    Attributes:
        to_rank: receives this rank's first rows.
        from_rank: sends its first rows.
        num_rows: number of rows.
        first_row: index of the received rows.
    """

    to_rank: int
    from_rank: int
    num_rows: int
    first_row: int


def sum_rounds(rank: int, num_ranks: int) -> tuple[SumRound, ...]:
    """Return the rounds of a rank in a sum by recursive doubling.

    With p the largest power of two up to N, rank p + i sends its numbers to rank i first and receives the sum at the
    end. In round k, the first p ranks exchange and add their sums in pairs whose numbers differ only in bit k.

    All ranks get the same bits: partners add the same two numbers, whose order does not matter (IEEE 754), so that
    after each round all ranks of a block of 2^k have the same sum. The order depends on N alone.
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
    """Return the rounds of a rank in a gather, for any N: round k adds up to 2^k rows after its first 2^k.

    Every row but its own arrives once: N - 1 rows, the minimum.
    """
    return tuple(
        GatherRound(
            (rank - known) % num_ranks, (rank + known) % num_ranks, min(known, num_ranks - known), first_row=known
        )
        for known in (1 << bit for bit in range((num_ranks - 1).bit_length()))
    )


def most_sum_rounds(num_ranks: int) -> int:
    """Return the number of successive rounds of a sum: `floor(log2 N)`, and two more unless N is a power of two."""
    doublings = num_ranks.bit_length() - 1
    return doublings if num_ranks == 1 << doublings else doublings + 2


def sum_messages(num_ranks: int) -> int:
    """Return the number of messages of all ranks in a sum: `p log2 p + 2 (N - p)`."""
    doublings = num_ranks.bit_length() - 1
    most = 1 << doublings
    return most * doublings + 2 * (num_ranks - most)


def gather_messages(num_ranks: int) -> int:
    """Return the number of messages of all ranks in a gather: `N ceil(log2 N)`."""
    return num_ranks * (num_ranks - 1).bit_length()
