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
from tests.faults import sees
from tests.parallel.worlds_in_processes import free_port

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
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8, 17])
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
        said, _ = rank.communicate(timeout=600)
        assert (said.strip(), rank.returncode) == ("threads: ['MainThread']", 0)
