"""Ranks that wait in two worlds: seen from what each says, and only if they wait for each other in vain."""

from collections.abc import Iterator
from unittest import mock

import pytest

from anybatch.parallel.deadlock_detector import DeadlockDetector
from anybatch.parallel.torch_internals import HashStore
from tests.faults import sees


@pytest.fixture(autouse=True)
def _one_store() -> Iterator[None]:
    store = HashStore()
    with mock.patch("anybatch.parallel.deadlock_detector.default_store", return_value=store):
        yield


def waiting(world_name: str, rank: int, size: int = 2) -> DeadlockDetector:
    """Return a rank that has begun to wait."""
    rank_waits = DeadlockDetector(world_name, rank, size)
    rank_waits.begin_wait()
    return rank_waits


@sees(
    "ranks do not look who waits in another world",
    "src/anybatch/parallel/deadlock_detector.py",
    "        if len(deadlocked) == 1:\n",
    "        if True:\n",
)
@sees(
    "who waits in vain is not published",
    "src/anybatch/parallel/deadlock_detector.py",
    "if published := self.published(number):",
    "if published := []:",
)
def test_two_that_wait_for_each_other() -> None:
    """One sees that the other says so again and again; a third one, which has seen nothing yet, is told."""
    saves, loads = waiting("engine", 0, 3), waiting("loader", 1, 3)
    for _ in range(2):
        assert saves.poll(7, "rank 0 called save") == []
        assert loads.poll(3, "rank 1 called next") == []
    assert saves.poll(7, "rank 0 called save") == []
    assert loads.poll(3, "rank 1 called next") == ["rank 0 called save", "rank 1 called next"]
    late = waiting("engine", 2, 3)
    assert late.poll(7, "rank 2 called save") == ["rank 0 called save", "rank 1 called next"]


def test_all_that_wait_are_named() -> None:
    """Two ranks in one call of another world are both said."""
    ranks = {1: waiting("loader", 1, 3), 2: waiting("loader", 2, 3), 0: waiting("engine", 0, 3)}
    *found, last = [one.poll(4, f"rank {rank}") for _ in range(3) for rank, one in ranks.items()]
    assert last == ["rank 0", "rank 1", "rank 2"]
    assert found == [[]] * 8


def test_what_a_rank_has_said_and_left() -> None:
    """An old word is not taken for a wait, however often it is read."""
    waiting("loader", 1).poll(3, "rank 1 called next")
    saves = waiting("engine", 0)
    assert [saves.poll(7, "rank 0 called save") for _ in range(9)] == [[]] * 9


@sees(
    "waits for one thing after the other are taken for one",
    "src/anybatch/parallel/deadlock_detector.py",
    "        place = str(world_name), int(number), int(wait)\n",
    "        place = str(world_name), 0, 0\n",
)
def test_a_rank_that_goes_on_from_wait_to_wait() -> None:
    """It moves, slowly, and nobody waits for it in vain."""
    saves, loads = waiting("engine", 0), waiting("loader", 1)
    for number in range(5):
        loads.begin_wait()
        for _ in range(1 + number):
            loads.poll(number, "rank 1 called next")
        assert saves.poll(7, "rank 0 called save") == []


@sees(
    "a wait in the same world is in vain",
    "src/anybatch/parallel/deadlock_detector.py",
    "            if world_name != self._world_name or is_split:\n",
    "            if True:\n",
)
def test_two_that_wait_in_one_world() -> None:
    """They may wait for a third one, which is late."""
    one, other = waiting("engine", 0, 3), waiting("engine", 1, 3)
    for _ in range(9):
        assert one.poll(7, "rank 0 called save") == []
        assert other.poll(7, "rank 1 called save") == []


@sees(
    "ranks in one call are not in a deadlock",
    "src/anybatch/parallel/deadlock_detector.py",
    "            if world_name != self._world_name or is_split:\n",
    "            if world_name != self._world_name:\n",
)
def test_all_wait_in_one_call_for_different_messages() -> None:
    """One waits for weights and the other for a small message: an error was caught on one of them."""
    one, other = waiting("engine", 0), DeadlockDetector("engine", 1, 2)
    other.begin_wait(in_control_group=False)
    for _ in range(2):
        assert one.poll(7, "rank 0 called step") == []
        assert other.poll(7, "rank 1 called step") == []
    assert one.poll(7, "rank 0 called step") == []
    assert other.poll(7, "rank 1 called step") == ["rank 0 called step", "rank 1 called step"]


def test_some_wait_in_one_call_for_different_messages() -> None:
    """They may be ahead of a third one, which is late, in different messages."""
    one, other = waiting("engine", 0, 3), DeadlockDetector("engine", 1, 3)
    other.begin_wait(in_control_group=False)
    for _ in range(9):
        assert one.poll(7, "rank 0 called step") == []
        assert other.poll(7, "rank 1 called step") == []
