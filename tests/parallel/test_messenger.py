"""Sums and gathers of the control plane, among many threads with an in-memory network and among processes."""

import os
import subprocess
import sys
import threading
from collections import defaultdict
from datetime import timedelta
from queue import Queue
from typing import Any

import pytest
import torch

from anybatch.parallel.control import Messenger
from anybatch.parallel.world import World
from anybatch.testing import RankPool
from tests.faults import sees
from tests.parallel.worlds_in_processes import free_port
from tests.ranks_fixture import Ranks

LONG = timedelta(seconds=20)


class Arrival:
    """A message in flight, like torch's `Work`."""

    def __init__(self, box: "Queue[torch.Tensor]", into: torch.Tensor | None) -> None:
        self._box = box
        self._into = into

    def wait(self, timeout: timedelta) -> None:
        """Wait for a received message; sent messages are already copied."""
        if self._into is not None:
            self._into.copy_(self._box.get(timeout=timeout.total_seconds()))


class InMemory:
    """A process group of threads that records the messages.

    Args:
        rank: of the group.
        boxes: by sender, receiver and tag; shared by all ranks.
    """

    def __init__(self, rank: int, boxes: "defaultdict[tuple[int, int, int], Queue[torch.Tensor]]") -> None:
        self._rank = rank
        self._boxes = boxes
        self.sent: list[int] = []

    def send(self, tensors: list[torch.Tensor], to_rank: int, tag: int) -> Arrival:
        """Send one tensor."""
        self.sent.append(tensors[0].nbytes)
        self._boxes[self._rank, to_rank, tag].put(tensors[0].clone())
        return Arrival(Queue(), None)

    def recv(self, tensors: list[torch.Tensor], from_rank: int, tag: int) -> Arrival:
        """Receive into one tensor."""
        return Arrival(self._boxes[from_rank, self._rank, tag], tensors[0])


@sees(
    "messenger: what comes is not added",
    "src/anybatch/parallel/control.py",
    "            numbers.add_(part)",
    "            numbers.copy_(part)",
    cases=["2", "3"],
)
@sees(
    "messenger: rows are written over those that are there",
    "src/anybatch/parallel/control.py",
    "one.first_row * row_bytes : (one.first_row + one.num_rows) * row_bytes",
    "0 : one.num_rows * row_bytes",
    cases=["3"],
)
@pytest.mark.parametrize("num_ranks", range(2, 18))
def test_any_number_of_ranks(num_ranks: int) -> None:
    """Alternating sums and gathers in flight give plain sums and all rows on every rank."""
    lock = threading.Lock()

    class Boxes(defaultdict[Any, Any]):
        def __missing__(self, key: object) -> Any:
            with lock:
                return super().__missing__(key) if key not in self else self[key]

    boxes = Boxes(Queue)
    groups = [InMemory(rank, boxes) for rank in range(num_ranks)]
    messengers: list[Any] = [Messenger(group, rank, num_ranks, LONG) for rank, group in enumerate(groups)]  # type: ignore[arg-type]
    numbers = [torch.tensor([2.0**rank, -rank, 0.5], dtype=torch.float64) for rank in range(num_ranks)]
    own = [bytes([rank, 7]) for rank in range(num_ranks)]
    rows = [bytearray(one) + bytes(2 * (num_ranks - 1)) for one in own]
    again = [torch.full((1,), float(rank)) for rank in range(num_ranks)]
    started = []
    for rank in reversed(range(num_ranks)):  # higher ranks start earlier
        started += [messengers[rank].start_sum(numbers[rank]), messengers[rank].start_gather(rows[rank])]
        started.append(messengers[rank].start_sum(again[rank]))
    for message in started:
        message.wait(LONG)
    for messenger in messengers:
        messenger.end(LONG.total_seconds())

    total = num_ranks * (num_ranks - 1) / 2
    assert [one.tolist() for one in numbers] == [[2.0**num_ranks - 1, -total, num_ranks / 2]] * num_ranks
    assert [bytes(one) for one in rows] == [b"".join(own[rank:] + own[:rank]) for rank in range(num_ranks)]
    assert [one.item() for one in again] == [total] * num_ranks


def sums_and_rows() -> tuple[list[float], list[list[float]], list[object]]:
    """Run on every rank: sum thirds, whose rounding depends on the order, and gather numbers and a large value."""
    with World.from_environment(device="cpu") as world, torch.inference_mode():
        numbers = torch.tensor([(world.rank + 1) / 3, 1e16, 1.0], dtype=torch.float64)
        work = world.start_sum(numbers)
        assert work is not None
        work.wait()
        rows = world.gather_numbers([world.rank / 3, 2.0**53])
        values = world.gather_objects(["x" * 5000 * world.rank, world.rank])
        return numbers.tolist(), rows, [(len(text), rank) for text, rank in values]


def check(found: list[Any], num_ranks: int) -> None:
    """Compare the results of all ranks with plain Python."""
    for numbers, rows, values in found:
        assert numbers == found[0][0]  # bitwise equal
        assert numbers[0] == pytest.approx(sum((rank + 1) / 3 for rank in range(num_ranks)), rel=1e-15)
        assert rows == [[rank / 3, 2.0**53] for rank in range(num_ranks)]
        assert values == [(5000 * rank, rank) for rank in range(num_ranks)]


def test_real_ranks(two_ranks: Ranks, three_ranks: Ranks) -> None:
    """Two and three processes sum and gather like plain Python, also numbers made in inference mode."""
    for ranks in (two_ranks, three_ranks):
        check(ranks.run(sums_and_rows), ranks.world_size)


@pytest.mark.slow
def test_five_real_ranks() -> None:
    """With five ranks, one is folded in before two rounds and gets the result afterwards."""
    with RankPool(5) as pool:
        check(pool.run(sums_and_rows), 5)


def test_an_error_is_raised_where_it_is_waited_for() -> None:
    """A broken connection raises from the message's wait; the thread survives, and later messages raise too."""

    class Broken(InMemory):
        def recv(self, *_: object) -> Arrival:
            message = "Connection closed by peer"
            raise RuntimeError(message)

    messenger = Messenger(Broken(0, defaultdict(Queue)), 0, 2, LONG)  # type: ignore[arg-type]
    for message in (messenger.start_sum(torch.ones(1)), messenger.start_sum(torch.ones(1))):
        with pytest.raises(RuntimeError, match="closed by peer"):
            message.wait(LONG)
        assert message.is_completed()
    messenger.end(LONG.total_seconds())


AT_EXIT = """
import atexit, os, threading
atexit.register(lambda: print("threads:", [one.name for one in threading.enumerate()]))
import torch
import anybatch as ab
world = ab.World.from_environment(device="cpu")
if world.rank == 0:
    started = world.start_sum(torch.ones(3))  # in which the other rank takes no part
"""


@pytest.mark.slow
def test_a_program_that_ends_takes_the_thread_along() -> None:
    """A message in flight at exit is abandoned before the interpreter shuts down; the exit status is 0."""
    variables = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-c", AT_EXIT],
            env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=60)
        assert (said.strip(), rank.returncode) == ("threads: ['MainThread']", 0)
