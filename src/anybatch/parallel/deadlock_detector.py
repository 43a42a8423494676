"""Finds deadlocks between worlds: one rank waits in a call of an engine, another one in a call of another engine.

Calls of one world are counted alike on all ranks; those of two worlds cannot be compared by their numbers. But a rank
that waits says so again and again. One that goes on waiting there while this one waits here waits in vain: this rank
has brought what it owes to all calls that it has left.
"""

import json
from collections.abc import Callable
from contextlib import suppress

from anybatch.parallel.torch_internals import Store, default_store

_PREFIX = "anybatch/waits"
_MIN_REPEATS = 2
"""Times that another rank must have published its wait again, each read during one wait of this rank."""


class DeadlockDetector:
    """Publishes that this rank waits in one world, and reads which ranks wait in other worlds.

    Args:
        world_name: the same on all ranks, and another for each world.
        rank: this rank.
        size: the number of ranks.
    """

    def __init__(self, world_name: str, rank: int, size: int) -> None:
        self._world_name = world_name
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._num_waits = 0
        self._num_polls = 0
        self._seen: dict[int, tuple[tuple[str, int, int], int, int]] = {}

    def begin_wait(self) -> None:
        """Begin to wait for something else than before."""
        self._num_waits, self._num_polls = self._num_waits + 1, 0
        self._seen.clear()

    def poll(self, number: int, here: str) -> list[str]:
        """Say that this rank still waits; return where ranks wait for each other in vain, and nothing if they do not.

        Args:
            number: of this rank's call.
            here: where it waits, as a clause.
        """
        self._num_polls += 1
        own = json.dumps([self._world_name, number, self._num_waits, self._num_polls, here])
        _try(lambda store: store.set(f"{_PREFIX}/{self._rank}", own))
        # The first rank that saw it has published it, and waits no longer: the others would not see it by themselves.
        if published := self.published(number):
            return published
        deadlocked, calls = [(self._rank, here)], {(self._world_name, number)}
        for other in self._others:
            if self._waits_in_another_world(other, text := _read(f"{_PREFIX}/{other}")):
                world_name, its_number, *_, clause = json.loads(text)
                deadlocked.append((other, clause))
                calls.add((world_name, its_number))
        if len(deadlocked) == 1:
            return []
        clauses = [clause for _, clause in sorted(deadlocked)]
        for world_name, its_number in calls:
            key, text = f"{_PREFIX}/deadlocked/{world_name}/{its_number}", json.dumps(clauses)
            _try(lambda store, key=key, text=text: store.set(key, text))  # type: ignore[misc]
        return clauses

    def published(self, number: int) -> list[str]:
        """Return where ranks wait for each other in vain, if another rank has seen that; nothing otherwise.

        Args:
            number: of this rank's call.
        """
        text = _read(f"{_PREFIX}/deadlocked/{self._world_name}/{number}")
        return list(json.loads(text)) if text else []

    def _waits_in_another_world(self, other: int, text: str) -> bool:
        """Whether a rank has said often enough, while this one waited, that it waits for one thing in another world."""
        if not text:
            return False
        world_name, number, wait, num_polls, _ = json.loads(text)
        place = str(world_name), int(number), int(wait)
        before = self._seen.get(other)
        if before is None or before[0] != place:
            self._seen[other] = place, num_polls, 0
            return False
        _, last, times = before
        times += num_polls > last
        self._seen[other] = place, num_polls, times
        return place[0] != self._world_name and times >= _MIN_REPEATS


def _read(key: str) -> str:
    found: list[str] = []
    _try(lambda store: found.append(store.get(key).decode() if store.check([key]) else ""))
    return found[0] if found else ""


def _try(act: Callable[[Store], object]) -> None:
    # The store may have gone with its rank: then the connections will break soon.
    with suppress(RuntimeError, ValueError):
        act(default_store())
