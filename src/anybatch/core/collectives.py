"""Message schedules of collectives, and their duration in the latency-bandwidth model.

**Gather.** A ring passes messages from neighbour to neighbour, which takes about N rounds. In the schedule of
`gather_rounds`, each round doubles the number of ranks whose data a rank has received, directly or indirectly.

Source: Bruck's all-gather, in Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH".

**Durations.** A message of n bytes takes `latency + n / bandwidth` (Hockney 1994). Each rank sends and receives
simultaneously at full bandwidth, and ranks do not slow each other down, as on a non-blocking switch. The arithmetic of
a reduction is ignored. In the formulas, N is the number of ranks, n the bytes of the whole tensor (the input of an
all-reduce or reduce-scatter, the output of an all-gather), a the latency and B the bandwidth.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH" (rings);
Patarasuk and Yuan 2009 (an all-reduce must send at least 2 (N - 1) / N of the bytes); Sanders, Speck and Traeff 2009,
"Two-tree algorithms for full bandwidth broadcast, reduction and scan" (trees).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from anybatch.core.geometry import ceil_div
from anybatch.errors import UserError


@dataclass(frozen=True, slots=True)
class GatherRound:
    """The message that a rank sends in one round of a gather, and the message that it receives.

    The rank sends its first `num_rows` rows, and receives as many rows, which it stores from `first_row` on. On rank r,
    row i holds the data of rank r + i.
    """

    to_rank: int
    from_rank: int
    num_rows: int
    first_row: int


def gather_rounds(rank: int, num_ranks: int) -> tuple[GatherRound, ...]:
    """Return the messages of a rank in each round of a gather, for any N: in round k it receives up to 2^k rows.

    A rank receives every row except its own once: N - 1 rows, the minimum.
    """
    return tuple(
        GatherRound(
            (rank - known) % num_ranks, (rank + known) % num_ranks, min(known, num_ranks - known), first_row=known
        )
        for known in (1 << bit for bit in range((num_ranks - 1).bit_length()))
    )


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
        """Return the link in the format that `parse_link` reads, in bits per second."""
        latency = self.latency_seconds * 1e6
        return f"{self.bytes_per_second * 8 / 1e9:.6g}Gbit,{latency:.6g}us"


def parse_link(text: str) -> Link:
    """Parse a text such as "400Gbit,5us", "1Gbit,1ms" or "25GB/s,2us": bandwidth, comma, latency.

    Prefixes are powers of 1000, as in network hardware. A small b and "bit" are bits, a capital B is bytes.

    Raises:
        UserError: the text has another form, or the bandwidth is 0; the latency may be 0.
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
    """Return the seconds of a reduce-scatter around a ring: N - 1 messages of n / N bytes (Thakur et al. 2005).

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

    `2 (N - 1) a + 2 (N - 1) / N n / B`: it sends the minimum number of bytes, but its latency grows with N.
    """
    return ring_reduce_scatter(num_bytes, num_ranks, link) + ring_all_gather(num_bytes, num_ranks, link)


def tree_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce through a double binary tree: to the roots and back (Sanders et al. 2009).

    `2 ceil(log2 N) a + 2 n / B`, if messages are split into enough chunks to keep all levels busy. A rank is a leaf of
    one tree and an inner node of the other: it sends half of the tensor once in the first tree and three times in the
    second.
    """
    if num_ranks == 1:
        return 0.0
    depth = (num_ranks - 1).bit_length()
    return 2 * depth * link.latency_seconds + 2 * num_bytes / link.bytes_per_second


def best_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of the faster algorithm, ring or tree: NCCL chooses between them by size."""
    return min(ring_all_reduce(num_bytes, num_ranks, link), tree_all_reduce(num_bytes, num_ranks, link))


def gloo_all_reduce(num_bytes: float, num_ranks: int, link: Link, *, item_bytes: int = 4) -> float:
    """Return the seconds of gloo's all-reduce around a ring, over TCP; `item_bytes` is the size of one number.

    Each rank's part of the tensor is split into k >= 2 segments of s <= 1 MiB. Two segments are in flight at a time,
    and each begins with the receiver's ready message (gloo/allreduce.cc; `sendNotifyRecvReady` in
    gloo/transport/tcp/pair.cc). So a segment takes `2 a + s / B`. A phase forwards S = (N - 1) k segments, and takes

        max(2 a + S s / B, ceil(S / 2) (2 a + s / B) + (s / B if S is even))

    where the first term is limited by the link and the second by the ready messages. An all-reduce consists of two such
    phases: 4 (N - 1) a, if latency dominates.

    A tensor with fewer items than segments leaves some segments empty. No rank waits for an empty segment. With E
    non-empty segments, the number of latencies is `2 (N - 1) + E / 2` up to E = N, and then rises linearly to
    `4 (N - 1)`. This follows from gloo's loops, which the test simulates event by event.
    """
    if num_ranks == 1 or not num_bytes:
        return 0.0
    num_segments = 2 * num_ranks
    per_rank = max(2, ceil_div(ceil_div(int(num_bytes), GLOO_SEGMENT_BYTES), num_ranks))
    items = ceil_div(int(num_bytes), item_bytes)
    filled = ceil_div(items, ceil_div(items, num_segments))  # an item is never split
    if filled < num_segments and per_rank == 2:  # noqa: PLR2004 (the minimum)
        extra = filled / 2
        if filled > num_ranks:
            above = (filled - num_ranks) / num_ranks
            extra = num_ranks / 2 + above * (num_segments - 2 - num_ranks / 2)
        waiting = (num_segments - 2 + extra) * link.latency_seconds + num_bytes / link.bytes_per_second
        return max(waiting, 4 * link.latency_seconds + 2 * num_bytes / link.bytes_per_second)
    return 2 * _gloo_phase((num_ranks - 1) * per_rank, num_bytes / (num_ranks * per_rank), link)


def _gloo_phase(num_segments: int, segment_bytes: float, link: Link) -> float:
    transfer_seconds = segment_bytes / link.bytes_per_second
    segment_seconds = 2 * link.latency_seconds + transfer_seconds
    waiting = ceil_div(num_segments, 2) * segment_seconds + (0.0 if num_segments % 2 else transfer_seconds)
    return max(2 * link.latency_seconds + num_segments * transfer_seconds, waiting)


def bruck_all_gather(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a gather with the schedule of `gather_rounds` over gloo (Bruck 1997).

    `(ceil(log2 N) + 1) a + (N - 1) / N n / B`, where the 1 is for the ready messages of gloo's receivers (see
    `gloo_all_reduce`), which are all sent at the start.
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
    """Return the seconds of a reduce-scatter in each host, an all-reduce over hosts, and an all-gather in each host.

    Each of a host's d devices reduces its part, n / d bytes, with the devices of the same index on the other hosts. All
    d devices share the host's link, so each gets a bandwidth of B / d, and `all_reduce(n / d, N / d, B / d)` takes as
    long as `all_reduce(n, N / d, B)` (Jia et al. 2018; `NCCL_HIERARCHICAL_ALLREDUCE` of Horovod). If the last host has
    fewer devices, the number of hosts is rounded up.
    """
    inside = min(num_ranks, devices_per_host)
    hosts = ceil_div(num_ranks, devices_per_host)
    return 2 * ring_reduce_scatter(num_bytes, inside, inner) + over_hosts(num_bytes, hosts, outer)


def hierarchical_all_gather(
    num_bytes: float, num_ranks: int, devices_per_host: int, *, inner: Link, outer: Link
) -> float:
    """Return the seconds of a hierarchical all-gather or reduce-scatter: a ring over hosts, and a ring in each host.

    Devices share the host's link, as in `hierarchical_all_reduce`.
    """
    inside = min(num_ranks, devices_per_host)
    hosts = ceil_div(num_ranks, devices_per_host)
    return ring_all_gather(num_bytes, inside, inner) + ring_all_gather(num_bytes, hosts, outer)
