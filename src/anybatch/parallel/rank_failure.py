"""Why another rank does not come: its own error, as a value for other ranks, or a deadlock of ranks that all wait.

Deadlocks: within one world all ranks number their calls alike; calls of two worlds cannot be compared by number. But a
waiting rank publishes its wait repeatedly. If another rank keeps waiting in one world while this rank waits in another,
it will never get an answer: this rank has sent its messages for all calls that it has left. Within one call, a deadlock
needs all ranks to wait: while one is late, the others may be waiting for different messages.
"""

import json
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from anybatch.errors import CannotRedoError, RankFailedError
from anybatch.parallel.torch_internals import Store, default_store


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A rank's own error, for the ranks that only see a broken connection; the fields are those of `RankFailedError`.

    `error_type` is None if the rank ended without an error; `reason` is the text of its error, and the engine's notes.
    """

    rank: int
    step: int | None
    error_type: str | None
    reason: str
    smaller_micro_batch_size: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, step: int | None) -> Self:
        """Return the failure of a rank that raised `error`."""
        return cls(
            rank=rank,
            step=step,
            error_type=type(error).__name__,
            reason=" ".join([str(error), *_engine_notes(error)]),
            smaller_micro_batch_size=error.smaller_micro_batch_size if isinstance(error, CannotRedoError) else None,
        )

    @classmethod
    def of_ended(cls, rank: int, step: int | None) -> Self:
        """Return the failure of a rank that has ended without an error, in a step of the rank that noticed."""
        return cls(rank=rank, step=step, error_type=None, reason="")

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a text from `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return the failure as text for a store."""
        return json.dumps(asdict(self))

    def error(self, message: str) -> RankFailedError:
        """Return the error that other ranks raise, with this failure in its fields."""
        return RankFailedError(message, **asdict(self))

    def __str__(self) -> str:
        """Return it as the beginning of a sentence, without a full stop."""
        if self.error_type is None:
            return (
                f"rank {self.rank} has ended without an error: it was killed, or its program ended before the others' "
                "(loaders of different lengths: wrap them in ab.shares)"
            )
        place = "between steps" if self.step is None else f"in step {self.step}"
        return f"rank {self.rank} failed {place}: {self.error_type}: {self.reason}"


def _engine_notes(error: BaseException) -> list[str]:
    """Return the engine's notes on an error of the user's code, such as the samples that it ran on."""
    return [f"({note})" for note in getattr(error, "__notes__", ()) if note.startswith("anybatch: ")]


def own_host() -> list[str]:
    """Return the name of this host and its process-number namespace, which differs between containers."""
    namespace = Path("/proc/self/ns/pid")
    return [socket.gethostname(), str(namespace.readlink()) if namespace.is_symlink() else ""]


def has_ended(process: str) -> bool:
    """Whether a process on this host, as published by its rank, has ended; False on other hosts."""
    *host, number = json.loads(process or "[0]")
    if host != own_host() or os.name != "posix":  # on Windows, os.kill(..., 0) sends Ctrl-C
        return False
    try:
        os.kill(number, 0)  # sends nothing
        state = Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rpartition(")")[2]
    except OSError as error:
        return isinstance(error, ProcessLookupError)  # False for another user's process, or without /proc
    return state.split()[0] == "Z"  # its parent has not read its exit status yet


_PREFIX = "anybatch/waits"
_MIN_REPEATS = 2
"""Minimum number of times that another rank must have published the same wait during one wait of this rank."""


def act_on_store(act: Callable[[Store], object]) -> None:
    """Call a function with the default group's store; do nothing if the store is gone."""
    # The rank that hosts the store may have ended: the connections will break soon.
    with suppress(RuntimeError, ValueError):
        act(default_store())


def read_store(key: str) -> str:
    """Return the text under a key of the default group's store; empty if there is none."""
    found: list[str] = []
    act_on_store(lambda store: found.append(store.get(key).decode() if store.check([key]) else ""))
    return found[0] if found else ""


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
        act_on_store(lambda store: store.set(f"{_PREFIX}/{self._rank}", json.dumps(own)))
        # The first rank that sees a deadlock publishes it and stops waiting, so the others would not see it.
        if published := self.published(number):
            return published
        texts = {other: read_store(f"{_PREFIX}/{other}") for other in self._others}
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
            act_on_store(lambda store, key=key, text=text: store.set(key, text))  # type: ignore[misc]
        return clauses

    def published(self, number: int) -> list[str]:
        """Return the clauses of a deadlock that another rank has detected; nothing otherwise."""
        text = read_store(f"{_PREFIX}/deadlocked/{self._world_name}/{number}")
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
