"""Detect deadlocks: ranks wait in calls of different engines, or all wait in one call, but for different messages.

Within one world all ranks number their calls alike; calls of two worlds cannot be compared by number. But a waiting
rank publishes its wait repeatedly. If another rank keeps waiting in one world while this rank waits in another, it will
never get an answer: this rank has sent its messages for all calls that it has left.

Within one call, a deadlock needs all ranks to wait: while one is late, the others may be waiting for different
messages.
"""

import json
from collections.abc import Callable
from contextlib import suppress

from anybatch.parallel.torch_internals import Store, default_store

_PREFIX = "anybatch/waits"
_MIN_REPEATS = 2
"""Minimum number of times that another rank must have published the same wait during one wait of this rank."""


class DeadlockDetector:
    """Publishes that this rank waits in one world, and reads which ranks wait in other worlds.

    `world_name` is the same on all ranks, and unique to the world.
    """

    def __init__(self, world_name: str, rank: int, size: int) -> None:
        self._world_name = world_name
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._num_waits = 0
        self._num_polls = 0
        self._seen: dict[int, tuple[tuple[str, int, int], int, int]] = {}
        self._in_control_group = True

    def begin_wait(self, *, in_control_group: bool = True) -> None:
        """Begin a new wait: for a small message (`in_control_group`), or for gradients or weights."""
        self._in_control_group = in_control_group
        self._num_waits, self._num_polls = self._num_waits + 1, 0
        self._seen.clear()

    def poll(self, number: int, here: str) -> list[str]:
        """Publish that this rank still waits at `here` (a clause); return the clauses of a deadlock, if any."""
        self._num_polls += 1
        own = [self._world_name, number, self._num_waits, self._num_polls, here, self._in_control_group]
        _try(lambda store: store.set(f"{_PREFIX}/{self._rank}", json.dumps(own)))
        # The first rank that sees a deadlock publishes it and stops waiting, so the others would not see it.
        if published := self.published(number):
            return published
        texts = {other: _read(f"{_PREFIX}/{other}") for other in self._others}
        waiting = {other: json.loads(text) for other, text in texts.items() if self._waits_on(other, text)}
        deadlocked, calls = [(self._rank, here)], {(self._world_name, number)}
        # All ranks wait in this call, but not all for the same kind of message.
        in_call = {other for other, said in waiting.items() if said[:2] == own[:2]}
        is_split = len(in_call) == len(self._others) and any(said[5] != own[5] for said in waiting.values())
        for other, (world_name, its_number, *_, clause, _kind) in waiting.items():
            if world_name != self._world_name or is_split:
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
        """Return the clauses of a deadlock that another rank has detected; nothing otherwise."""
        text = _read(f"{_PREFIX}/deadlocked/{self._world_name}/{number}")
        return list(json.loads(text)) if text else []

    def _waits_on(self, other: int, text: str) -> bool:
        """Whether a rank has published the same wait often enough during this rank's wait."""
        if not text:
            return False
        world_name, number, wait, num_polls, *_ = json.loads(text)
        place = str(world_name), int(number), int(wait)
        before = self._seen.get(other)
        if before is None or before[0] != place:
            self._seen[other] = place, num_polls, 0
            return False
        _, last, times = before
        times += num_polls > last
        self._seen[other] = place, num_polls, times
        return bool(times >= _MIN_REPEATS)


def _read(key: str) -> str:
    found: list[str] = []
    _try(lambda store: found.append(store.get(key).decode() if store.check([key]) else ""))
    return found[0] if found else ""


def _try(act: Callable[[Store], object]) -> None:
    # The rank that hosts the store may have ended: the connections will break soon.
    with suppress(RuntimeError, ValueError):
        act(default_store())
