"""Message rounds of sums and gathers for any number of ranks, simulated message by message in one process."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anybatch.core.collectives import (
    Link,
    bruck_all_gather,
    doubling_all_reduce,
    gather_messages,
    gather_rounds,
    sum_messages,
    sum_rounds,
)

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


def summed(values: Sequence[float], num_bytes: float = 8.0) -> tuple[list[float], float, int]:
    """Return each rank's sum, the time when the last one has it, and all messages."""
    num_ranks, has, now, network = len(values), list(values), [0.0] * len(values), Network(LINK)

    def act(rank: int, one: Any, *, sends: bool) -> bool:
        if sends:
            if one.sends:
                now[rank] = network.send(rank, one.partner, has[rank], num_bytes, now[rank])
            return True
        if one.receives == "nothing":
            return True
        if (found := network.receive(one.partner, rank)) is None:
            return False
        has[rank] = found[0] + (has[rank] if one.receives == "part" else 0.0)
        now[rank] = max(now[rank], found[1])
        return True

    run(num_ranks, lambda rank: sum_rounds(rank, num_ranks), act)
    return has, max(now), network.num_messages


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
def test_sums_are_plain_sums(num_ranks: int) -> None:
    """Every rank has the sum of all, each value once, as powers of two show."""
    found, _, num_messages = summed([2.0**rank for rank in range(num_ranks)])

    assert found == [2.0**num_ranks - 1.0] * num_ranks
    assert num_messages == sum_messages(num_ranks)


@given(values=st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=17))
def test_all_ranks_have_the_same_bits(values: list[float]) -> None:
    """All ranks get bitwise the same sums, for any values and any order of messages."""
    found, _, _ = summed(values)

    assert len({struct.pack("d", one) for one in found}) == 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_gathers_bring_every_row_once(num_ranks: int) -> None:
    """Every rank gets each row exactly once, in rank order."""
    rows, _, num_messages = gathered(num_ranks)

    assert rows == [list(range(num_ranks))] * num_ranks
    assert num_messages == gather_messages(num_ranks)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_formulas_message_by_message(num_ranks: int) -> None:
    """The formulas of chapter 21 match these messages; a sum beyond a power of two may save one."""
    for num_bytes in (8.0, 640.0):
        said = doubling_all_reduce(num_bytes, num_ranks, LINK)
        happened = summed([1.0] * num_ranks, num_bytes)[1]
        saves = 0.0 if num_ranks == 2 ** (num_ranks.bit_length() - 1) else LINK.seconds(num_bytes)
        rows = bruck_all_gather(num_bytes * num_ranks, num_ranks, LINK)

        assert said - saves - 1e-9 <= happened <= said + 1e-9
        assert rows == pytest.approx(gathered(num_ranks, num_bytes)[1], rel=1e-12)
