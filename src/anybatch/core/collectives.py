"""Message schedules of collectives, and their duration in the latency-bandwidth model.

A ring passes a message from neighbour to neighbour, which takes about N rounds. Here each round doubles the number of
ranks whose data a rank has received, directly or indirectly.

Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (recursive
doubling, with ranks beyond a power of two folded in; Bruck's all-gather, of Bruck et al. 1997).

A message of n bytes takes `latency + n / bandwidth` (Hockney 1994), each rank sends and receives simultaneously at full
bandwidth, and ranks do not slow each other down: a network without contention, like a non-blocking switch. The
arithmetic of a reduction is ignored. N is the number of ranks, n the bytes of the whole tensor (which all ranks have in
an all-reduce, before a reduce-scatter, and after an all-gather), a the latency and B the bandwidth.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (rings);
Patarasuk and Yuan 2009 (an all-reduce must send at least 2 (N - 1) / N of the bytes); Sanders, Speck and Traeff 2009,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan" (trees).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from anybatch.core.geometry import ceil_div
from anybatch.errors import UserError


@dataclass(frozen=True, slots=True)
class SumRound:
    """A rank's messages in one round of a sum; a received part is added to its own, a received sum replaces it."""

    partner: int
    sends: bool
    receives: Literal["part", "sum", "nothing"]


@dataclass(frozen=True, slots=True)
class GatherRound:
    """Messages of one round of a gather: a rank sends its first rows, and receives equally many from `first_row` on.

    Row i belongs to the i-th rank after it, and row 0 to itself.
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


GLOO_SEGMENT_BYTES = 2**20
"""Maximum size of one of gloo's messages (`kMaxSegmentSize` in gloo/allreduce.h)."""
_BIT_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between two ranks, or two hosts; the bandwidth is in each direction."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_seconds + num_bytes / self.bytes_per_second

    def __str__(self) -> str:
        """Return it in the format of `parse_link`, in bits."""
        latency = self.latency_seconds * 1e6
        return f"{self.bytes_per_second * 8 / 1e9:.6g}Gbit,{latency:.6g}us"


def parse_link(text: str) -> Link:
    """Return the link of a text such as "400Gbit,5us", "1Gbit,1ms" or "25GB/s,2us": bandwidth, comma, latency.

    Prefixes are powers of 1000, as in network hardware. A small b and "bit" are bits, a capital B is bytes.

    Raises:
        UserError: the text has another form, or a number is not above 0; a latency may be 0.
    """
    bandwidth, comma, latency = text.replace(" ", "").partition(",")
    rate = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([kKMGT]?)(bits?|b|B)(?:/s|ps)?", bandwidth)
    time = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(s|ms|us|µs|ns)", latency)
    if not comma or rate is None or time is None or not float(rate[1]):
        message = (
            f"{text!r} is not a link. Write a bandwidth above 0 and a latency with their units, such as 400Gbit,5us, "
            "1Gbit,1ms or 25GB/s,2us."
        )
        raise UserError(message, code="not_a_link")
    bits = float(rate[1]) * _BIT_PREFIXES[rate[2].lower()] * (8 if rate[3] == "B" else 1)
    return Link(latency_seconds=float(time[1]) * _TIME_UNITS[time[2]], bytes_per_second=bits / 8)


def ring_reduce_scatter(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a reduce-scatter around a ring: N - 1 messages of a part each (Thakur et al. 2005).

    `(N - 1) (a + n / (N B))`
    """
    return (num_ranks - 1) * link.seconds(num_bytes / num_ranks)


def ring_all_gather(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather around a ring, with the messages of a reduce-scatter (Thakur et al. 2005).

    `(N - 1) (a + n / (N B))`
    """
    return (num_ranks - 1) * link.seconds(num_bytes / num_ranks)


def ring_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce around a ring: a reduce-scatter, then an all-gather (Patarasuk, Yuan 2009).

    `2 (N - 1) a + 2 (N - 1) / N n / B`: the minimum of bytes, and a latency that grows with the ranks.
    """
    return ring_reduce_scatter(num_bytes, num_ranks, link) + ring_all_gather(num_bytes, num_ranks, link)


def tree_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce through a double binary tree: to the roots and back (Sanders et al. 2009).

    `2 ceil(log2 N) a + 2 n / B`, for messages that are cut finely enough to keep all levels busy: a rank is a leaf of
    one tree and an inner node of the other, and sends half of the tensor once in the first and three times in the
    second.
    """
    if num_ranks == 1:
        return 0.0
    depth = (num_ranks - 1).bit_length()
    return 2 * depth * link.latency_seconds + 2 * num_bytes / link.bytes_per_second


def best_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of the faster of ring and tree, as NCCL chooses by size: `min(ring, tree)`."""
    return min(ring_all_reduce(num_bytes, num_ranks, link), tree_all_reduce(num_bytes, num_ranks, link))


def gloo_all_reduce(num_bytes: float, num_ranks: int, link: Link, *, item_bytes: int = 4) -> float:
    """Return the seconds of gloo's all-reduce around a ring, over TCP; `item_bytes` is the size of one number.

    Each rank's part is cut into k >= 2 segments of s <= 1 MiB. Two segments are in flight at a time, and each begins
    with the receiver's ready message (gloo/allreduce.cc; `sendNotifyRecvReady` in gloo/transport/tcp/pair.cc). So a
    segment takes `2 a + s / B`, and a phase, which passes on S = (N - 1) k of them, takes

        max(2 a + S s / B, ceil(S / 2) (2 a + s / B) + (s / B if S is even))

    limited by either the link or the waiting. An all-reduce is two such phases: 4 (N - 1) a, if latency dominates.

    A message with fewer items than segments leaves some segments empty. No rank waits for these, so receivers are ready
    early: with E non-empty segments, the number of latencies is `2 (N - 1) + E / 2` up to E = N, and then rises
    linearly to the number above. This follows from gloo's loops, which the test simulates event by event.
    """
    if num_ranks == 1 or not num_bytes:
        return 0.0
    most = 2 * num_ranks
    per_rank = max(2, ceil_div(ceil_div(int(num_bytes), GLOO_SEGMENT_BYTES), num_ranks))
    items = ceil_div(int(num_bytes), item_bytes)
    filled = ceil_div(items, ceil_div(items, most))  # items are never cut
    if filled < most and per_rank == 2:  # noqa: PLR2004 (the minimum)
        extra = filled / 2
        if filled > num_ranks:
            above = (filled - num_ranks) / num_ranks
            extra = num_ranks / 2 + above * (most - 2 - num_ranks / 2)
        waiting = (most - 2 + extra) * link.latency_seconds + num_bytes / link.bytes_per_second
        return max(waiting, 4 * link.latency_seconds + 2 * num_bytes / link.bytes_per_second)
    return 2 * _gloo_phase((num_ranks - 1) * per_rank, num_bytes / (num_ranks * per_rank), link)


def _gloo_phase(num_segments: int, segment_bytes: float, link: Link) -> float:
    on_the_wire = segment_bytes / link.bytes_per_second
    one = 2 * link.latency_seconds + on_the_wire
    waiting = ceil_div(num_segments, 2) * one + (0.0 if num_segments % 2 else on_the_wire)
    return max(2 * link.latency_seconds + num_segments * on_the_wire, waiting)


def doubling_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a sum by recursive doubling (`message_rounds.sum_rounds`; Thakur et al. 2005).

    `(r + 1) a + r n / B` with r rounds: `floor(log2 N)`, and unless N is a power of two, two more (one may be saved).
    The 1 is for the ready messages of gloo's receivers (see `gloo_all_reduce`), all at the start.
    """
    rounds = most_sum_rounds(num_ranks)
    return link.latency_seconds + rounds * link.seconds(num_bytes) if rounds else 0.0


def bruck_all_gather(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a gather whose rows double with each round (`message_rounds.gather_rounds`; Bruck 1997).

    `(ceil(log2 N) + 1) a + (N - 1) / N n / B`, the 1 as in `doubling_all_reduce`.
    """
    if num_ranks == 1:
        return 0.0
    rounds = (num_ranks - 1).bit_length()
    return (rounds + 1) * link.latency_seconds + (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_second


def hierarchical_all_reduce(
    num_bytes: float,
    num_ranks: int,
    devices_per_host: int,
    *,
    inner: Link,
    outer: Link,
    over_hosts: Callable[[float, int, Link], float] = ring_all_reduce,
) -> float:
    """Return the seconds of an all-reduce by hosts: reduce-scatter in each, all-reduce over them, all-gather in each.

    Each of a host's d devices reduces its part, n / d, with the devices of the same index on the other hosts. All d
    share the host's one link, so each has B / d of it, and `all_reduce(n / d, N / d, B / d)` has the bytes of
    `all_reduce(n, N / d, B)` (Jia et al. 2018; `NCCL_HIERARCHICAL_ALLREDUCE` of Horovod). If hosts are not full the
    number of hosts is rounded up.
    """
    inside = min(num_ranks, devices_per_host)
    hosts = ceil_div(num_ranks, devices_per_host)
    return 2 * ring_reduce_scatter(num_bytes, inside, inner) + over_hosts(num_bytes, hosts, outer)


def hierarchical_all_gather(
    num_bytes: float, num_ranks: int, devices_per_host: int, *, inner: Link, outer: Link
) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, by hosts: over hosts, and in each host.

    Devices share the host's link, as in `hierarchical_all_reduce`: a ring over hosts, and a ring in each.
    """
    inside = min(num_ranks, devices_per_host)
    hosts = ceil_div(num_ranks, devices_per_host)
    return ring_all_gather(num_bytes, inside, inner) + ring_all_gather(num_bytes, hosts, outer)
