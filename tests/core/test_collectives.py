"""Message rounds of gathers for any number of ranks, simulated message by message in one process."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.collectives import (
    GLOO_SEGMENT_BYTES,
    Link,
    best_all_reduce,
    bruck_all_gather,
    gather_rounds,
    gloo_all_reduce,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    parse_link,
    ring_all_reduce,
    tree_all_reduce,
)
from anybatch.errors import UserError
from tests.raising import raises

RANKS = range(1, 18)
LINK = Link(latency_seconds=1.0, bytes_per_second=64.0)


class Network:
    """Messages in transit with their arrival times; receivers are ready at time 0."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._under_way: dict[tuple[int, int], tuple[Any, float]] = {}
        self.num_messages = 0

    def send(self, sender: int, receiver: int, what: Any, num_bytes: float, now: float) -> float:
        """Send, and return when the sender is free again."""
        assert (sender, receiver) not in self._under_way, "two messages from one rank to another have the same tag"
        begun = max(now, self._link.latency_seconds)
        self.num_messages += 1
        self._under_way[sender, receiver] = what, begun + self._link.seconds(num_bytes)
        return begun + num_bytes / self._link.bytes_per_second

    def receive(self, sender: int, receiver: int) -> tuple[Any, float] | None:
        """Return the message and its arrival time; None if it has not been sent yet."""
        return self._under_way.pop((sender, receiver), None)


def run(num_ranks: int, rounds_of: Callable[[int], Sequence[Any]], act: Callable[..., bool]) -> None:
    """Run the rounds of all ranks, each as far as possible, until all are done."""
    left = {rank: list(rounds_of(rank)) for rank in range(num_ranks)}
    sent = dict.fromkeys(left, False)
    while any(left.values()):
        moved = False
        for rank, rounds in left.items():
            while rounds:
                if not sent[rank]:
                    act(rank, rounds[0], sends=True)
                    sent[rank] = moved = True
                if not act(rank, rounds[0], sends=False):
                    break
                rounds.pop(0)
                sent[rank], moved = False, True
        assert moved, "ranks wait for each other in vain"


def gathered(num_ranks: int, row_bytes: float = 8.0) -> tuple[list[list[int]], float, int]:
    """Return each rank's rows, the time when the last one has them, and all messages."""
    has = [{0: rank} for rank in range(num_ranks)]  # by place
    now, network = [0.0] * num_ranks, Network(LINK)

    def act(rank: int, one: Any, *, sends: bool) -> bool:
        if sends:
            rows = [has[rank][place] for place in range(one.num_rows)]
            network.send(rank, one.to_rank, rows, row_bytes * len(rows), now[rank])
            return True
        if (found := network.receive(one.from_rank, rank)) is None:
            return False
        for place, row in enumerate(found[0], start=one.first_row):
            assert place < num_ranks
            assert place not in has[rank]
            has[rank][place] = row
        assert len(found[0]) == one.num_rows
        now[rank] = max(now[rank], found[1])
        return True

    run(num_ranks, lambda rank: gather_rounds(rank, num_ranks), act)
    rows = [[has[rank][(other - rank) % num_ranks] for other in range(num_ranks)] for rank in range(num_ranks)]
    return rows, max(now), network.num_messages


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gathers_bring_every_row_once(num_ranks: int) -> None:
    """Every rank gets each row exactly once, in rank order."""
    rows, _, num_messages = gathered(num_ranks)

    assert rows == [list(range(num_ranks))] * num_ranks
    assert num_messages == num_ranks * (num_ranks - 1).bit_length()  # N ceil(log2 N)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_formulas_message_by_message(num_ranks: int) -> None:
    """The formula of a gather matches these messages."""
    for num_bytes in (8.0, 640.0):
        rows = bruck_all_gather(num_bytes * num_ranks, num_ranks, LINK)
        assert rows == pytest.approx(gathered(num_ranks, num_bytes)[1], rel=1e-12)


Collective = Callable[[float, int, Link], float]
ALL_REDUCES: tuple[Collective, ...] = (
    ring_all_reduce,
    tree_all_reduce,
    best_all_reduce,
    gloo_all_reduce,
)
LINKS = st.builds(Link, st.floats(0.0, 0.1), st.floats(1e5, 1e12))
SIZES = st.integers(1, 10**10)


@pytest.mark.parametrize("collective", ALL_REDUCES)
@given(num_bytes=SIZES, num_ranks=st.integers(2, 10_000), link=LINKS)
@pytest.mark.slow
def test_no_all_reduce_is_faster_than_its_bytes(
    collective: Collective, num_bytes: int, num_ranks: int, link: Link
) -> None:
    """Each rank sends at least 2 (N - 1) / N of the bytes and hears from the farthest one (Patarasuk, Yuan 2009)."""
    least = 2 * (num_ranks - 1) / num_ranks * num_bytes / link.bytes_per_second
    depth = math.ceil(math.log2(num_ranks))
    assert collective(num_bytes, num_ranks, link) >= 0.999_999 * max(least, depth * link.latency_seconds)


@given(num_bytes=SIZES, hosts=st.integers(1, 1000), devices=st.integers(1, 8), outer=LINKS, inner=LINKS)
def test_hierarchical(num_bytes: int, hosts: int, devices: int, outer: Link, inner: Link) -> None:
    """Within a host, times are a single host's; between hosts, they match hosts with one device each."""
    ranks = hosts * devices
    seconds = hierarchical_all_reduce(num_bytes, ranks, devices, inner=inner, outer=outer)
    gather = hierarchical_all_gather(num_bytes, ranks, devices, inner=inner, outer=outer)

    inside, between = ring_all_reduce(num_bytes, devices, inner), ring_all_reduce(num_bytes, hosts, outer)
    assert seconds == pytest.approx(inside + between, rel=1e-12)
    assert gather == pytest.approx(seconds / 2, rel=1e-12)


def gloo_by_events(num_items: int, num_ranks: int, link: Link, *, item_bytes: int = 8) -> float:
    """Return when the last rank is done, following gloo's own loops (gloo/allreduce.cc) iteration by iteration.

    A posted receive notifies the sender; the segment leaves once the sender has the notice and the data, after all
    earlier segments; two iterations later both wait for it.
    """
    total = num_items * item_bytes
    most = math.ceil(total / GLOO_SEGMENT_BYTES)
    num_segments = math.ceil(max(most, 2 * num_ranks) / num_ranks) * num_ranks
    per_rank = num_segments // num_ranks
    segment = math.ceil(math.ceil(total / num_segments) / item_bytes) * item_bytes
    now = [0.0] * num_ranks
    for shift in (1, 0):  # reduce-scatter, then all-gather
        arrived: list[list[float]] = [[] for _ in range(num_ranks)]
        free = [0.0] * num_ranks  # when a rank's link is free to send
        for iteration in range(num_segments - per_rank + 2):
            for rank in range(num_ranks):
                if iteration >= 2:
                    place = ((rank + shift + 1) * per_rank + iteration - 2) % num_segments
                    if place * segment < total:
                        now[rank] = max(now[rank], arrived[rank][iteration - 2])
            if iteration >= num_segments - per_rank:
                continue
            for rank in range(num_ranks):
                sender = (rank + 1) % num_ranks
                place = ((rank + shift + 1) * per_rank + iteration) % num_segments
                size = max(0, min(segment, total - place * segment))
                leaves = max(now[rank] + link.latency_seconds, now[sender], free[sender] if size else 0.0)
                if size:
                    free[sender] = leaves + size / link.bytes_per_second
                arrived[rank].append(leaves + link.latency_seconds + size / link.bytes_per_second)
    return max(now)


@given(
    num_ranks=st.integers(2, 12),
    mebibytes=st.floats(0.1, 60.0),
    latency=st.floats(0.0, 0.05),
    rate=st.floats(1e6, 1e10),
)
def test_gloo_ring_event_by_event(num_ranks: int, mebibytes: float, latency: float, rate: float) -> None:
    """The formula for a full ring matches gloo's loops, within 3% and the time of one segment."""
    link, items = Link(latency, rate), int(mebibytes * 2**20 / 8)
    seconds = gloo_all_reduce(8 * items, num_ranks, link)
    one = min(GLOO_SEGMENT_BYTES, 8 * items / (2 * num_ranks)) / rate + 2 * latency

    assert seconds == pytest.approx(gloo_by_events(items, num_ranks, link), rel=0.03, abs=2 * one)


@given(num_ranks=st.integers(3, 24), num_items=st.integers(1, 60))
def test_small_messages_of_gloo(num_ranks: int, num_items: int) -> None:
    """For small messages, with mostly empty segments, latencies match gloo's loops within 3 and 10%."""
    link = Link(1.0, math.inf)
    seconds = gloo_all_reduce(8 * num_items, num_ranks, link, item_bytes=8)

    assert seconds == pytest.approx(gloo_by_events(num_items, num_ranks, link), rel=0.1, abs=3.0)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("400Gbit,5us", Link(5e-6, 50e9)),
        ("1Gbit, 1ms", Link(1e-3, 125e6)),
        ("25GB/s,2us", Link(2e-6, 25e9)),
        ("100 Mbit/s,0s", Link(0.0, 12.5e6)),
        ("10Gbps,1.5ms", Link(1.5e-3, 1.25e9)),
        ("1.5Tbit,800ns", Link(8e-7, 187.5e9)),
    ],
)
def test_links_round_trip(text: str, link: Link) -> None:
    """A link in bits or bytes, with prefixes and a latency, is parsed, and its printed form parses again."""
    found = parse_link(text)

    assert found.latency_seconds == pytest.approx(link.latency_seconds)
    assert found.bytes_per_second == pytest.approx(link.bytes_per_second)
    again = parse_link(str(found))
    assert again.latency_seconds == pytest.approx(found.latency_seconds)
    assert again.bytes_per_second == pytest.approx(found.bytes_per_second)


@pytest.mark.parametrize(
    "text", ["", "400Gbit", "5us,400Gbit", "0Gbit,5us", "-1Gbit,5us", "400,5us", "400Gbit,5", "1GiB,1us"]
)
def test_invalid_links(text: str) -> None:
    """An invalid link raises with the text and the notation."""
    with raises(UserError, "not_a_link") as caught:
        parse_link(text)
    assert repr(text) in str(caught.value)
