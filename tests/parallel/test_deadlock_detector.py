"""Ranks that wait in two worlds are detected from their reports if they wait for each other forever."""

from collections.abc import Iterator
from unittest import mock

import pytest

from anybatch.parallel.rank_failure import DeadlockDetector
from anybatch.parallel.torch_internals import HashStore


@pytest.fixture(autouse=True)
def _one_store() -> Iterator[None]:
    store = HashStore()
    with mock.patch("anybatch.parallel.rank_failure.default_store", return_value=store):
        yield


def waiting(world_name: str, rank: int, size: int = 2) -> DeadlockDetector:
    """Return the detector of a rank that has started to wait."""
    rank_waits = DeadlockDetector(world_name, rank, size)
    rank_waits.begin_wait()
    return rank_waits


def test_two_that_wait_for_each_other() -> None:
    """A rank that reads the other's report repeatedly reports a deadlock; a third rank reads this report."""
    saves, loads = waiting("engine", 0, 3), waiting("loader", 1, 3)
    for _ in range(2):
        assert saves.poll(7, "rank 0 called save") == []
        assert loads.poll(3, "rank 1 called next") == []
    assert saves.poll(7, "rank 0 called save") == []
    assert loads.poll(3, "rank 1 called next") == ["rank 0 called save", "rank 1 called next"]
    late = waiting("engine", 2, 3)
    assert late.poll(7, "rank 2 called save") == ["rank 0 called save", "rank 1 called next"]


def test_a_rank_that_goes_on_from_wait_to_wait() -> None:
    """A rank that moves slowly from wait to wait is not deadlocked."""
    saves, loads = waiting("engine", 0), waiting("loader", 1)
    for number in range(5):
        loads.begin_wait()
        for _ in range(1 + number):
            loads.poll(number, "rank 1 called next")
        assert saves.poll(7, "rank 0 called save") == []


def test_all_wait_in_one_call_for_different_messages() -> None:
    """If all ranks wait in one call, but for different messages, one of them has caught an error: a deadlock."""
    one, other = waiting("engine", 0), DeadlockDetector("engine", 1, 2)
    other.begin_wait(in_control_group=False)
    for _ in range(2):
        assert one.poll(7, "rank 0 called step") == []
        assert other.poll(7, "rank 1 called step") == []
    assert one.poll(7, "rank 0 called step") == []
    assert other.poll(7, "rank 1 called step") == ["rank 0 called step", "rank 1 called step"]
