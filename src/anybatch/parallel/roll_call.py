"""Where ranks stand: calls are counted alike on all of them, so that those who wait can tell who will not come.

Nothing is written while ranks are together. A rank that has waited for a while writes where it stands into the store,
reads where the others stand, and goes on waiting if they may still come: a slow rank is never taken for a failed one.
"""

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anybatch.errors import RankFailedError, RanksDifferError, UserError, WorldError
from anybatch.parallel.deadlock_detector import DeadlockDetector
from anybatch.parallel.keep_alive import KeepAlive
from anybatch.parallel.messenger import Work
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.torch_internals import Store, default_store, leave_groups_alone

_PREFIX = "anybatch/roll_call"
_ENDED_KEY = "anybatch/ended"
_FIRST_PATIENCE_SECONDS = 0.5
_MOST_PATIENCE_SECONDS = 4.0
_LEAVING_SECONDS = 4.0
_LEFT_MESSAGES: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""By default group, where this rank left a message that another one has not answered: the next would be its answer."""
_MOST_TIMES_BROKEN = 2
"""Times in a row that the next rank may be found gone: its program may be over, and the last message under way."""
_NUM_LOOKS_FOR_CAUSE, _BETWEEN_LOOKS_SECONDS = 20, 0.1
"""How often a rank whose connection broke looks for the cause: other ranks may publish it a little later."""
_START_AGAIN = "Start all ranks again, from the last checkpoint."
NUM_DIGESTS = 4
"""Of the call, the batch, the settings and the replicas."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a rank stands.

    Attributes:
        rank: which one.
        number: of the common call, counted alike on all ranks.
        name: of what was called, such as "engine.save".
        step: number of the engine's step, from 0 on; None between steps.
        barrier: the rank waits for all others before it begins.
    """

    rank: int
    number: int
    name: str
    step: int | None
    barrier: bool

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return it as text for a store."""
        return json.dumps(asdict(self))

    def contradicts(self, other: "Whereabouts") -> bool:
        """Whether the two ranks wait for each other in vain; ranks in calls of other numbers are only early or late."""
        mine = self.name, self.step, self.barrier
        return self.number == other.number and mine != (other.name, other.step, other.barrier)

    def __str__(self) -> str:
        """Return it as a clause."""
        return f"rank {self.rank} called {self.name}{_at(self.step)}"


class RollCall:
    """What this rank is in, and what it knows of the others. One for each control group.

    Args:
        world_name: the same on all ranks, and another for each control group.
        rank: this rank.
        size: the number of ranks.
        timeout: how long a rank waits for the others to come to a call.
        keep_alive: connection to the next rank, as far as there is one yet.

    Attributes:
        keep_alive: as given, until the ranks have made another one.
        digests: of what this rank means by the step: its call, batch, settings and replica; each below 2**20.
        shards_digest: of its parts of weights that ranks share out; the same in one data group, below 2**20.
        has_agreed: whether the last message of the step is on its way, so that other ranks wait for nothing more.
        num_told: errors that all ranks have learnt of together.
        newest_engine: a number of the engine that made the newest step, where strategies replace parameters; 0: none.
    """

    def __init__(
        self, world_name: str, rank: int, size: int, timeout: timedelta, keep_alive: KeepAlive | None = None
    ) -> None:
        self._world_name = world_name
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout.total_seconds()
        self.keep_alive = keep_alive
        self._times_broken = 0
        self._deadlocks = DeadlockDetector(world_name, rank, size)
        self.number = 0
        self._name = ""
        self._step: int | None = None
        self._inside = False
        self._has_failed = False
        self._barrier = False
        self._out_of_step = _LEFT_MESSAGES.get(default_group(), "")
        self.digests: tuple[int, ...] = (0,) * NUM_DIGESTS
        self.has_agreed = False
        self.num_told = self.newest_engine = 0
        self.shards_digest = 0
        self._num_left = 0
        self._has_timed_out = False

    @property
    def is_inside(self) -> bool:
        """Whether this rank is in a call."""
        return self._inside

    @property
    def next_has_ended(self) -> bool:
        """Whether the next rank has ended without closing its engine, as far as this one can see."""
        return self.keep_alive is not None and self.keep_alive.is_broken

    @property
    def compared(self) -> tuple[tuple[int, ...], int]:
        """The digests, and that of parts of weights."""
        return self.digests, self.shards_digest

    @property
    def here(self) -> Whereabouts:
        """Where this rank stands."""
        return Whereabouts(self._rank, self.number, self._name, self._step, self._barrier)

    def enter(self, name: str, step: int | None, *, barrier: bool) -> None:
        """Begin a call that every rank has to make. Sends nothing.

        Args:
            name: of what was called.
            step: number of the step; None between steps.
            barrier: `wait_at_barrier` waits for all ranks; for what is called now and then.

        Raises:
            UserError: this rank is in a call already.
        """
        if self._inside:
            message = (
                f"{name} was called while {self._name} runs: from inside it (a loss function, hook or observer), or "
                "from another thread. Call one after the other, from one thread."
            )
            raise UserError(message)
        # Behind an error ranks may not be together any more: they look before they send anything.
        self.number, self._name, self._step, self._barrier = self.number + 1, name, step, barrier or self._has_failed
        self._inside, self._has_failed, self.has_agreed = True, False, False

    def wait_at_barrier(self) -> None:
        """Wait until all ranks are in this call, where it asks for that, by the store alone.

        So no message of one call can be taken for one of another.

        Raises:
            RanksDifferError: another rank has called something else.
            RankFailedError: another rank cannot come.
            WorldError: another rank has not come before the time-out; or this rank has left a message that the others
                wait for, so that none can be sent any more.
        """
        if self._out_of_step:
            message = (
                f"{self._name} cannot run, because ranks cannot be brought together again behind an earlier error "
                f"({self._out_of_step}). {_START_AGAIN}"
            )
            raise WorldError(message)
        if not self._barrier:
            return
        try:
            # With its name: ranks that have called different things do not meet, and say so.
            self._wait_in_store(default_store(), f"{self._key('met', self.number)}/{self._name}")
        except WorldError:
            raise
        except (RuntimeError, ValueError):
            # The store has gone with its launcher. Ranks that are all here can still save, as they would without it.
            return

    def leave(self) -> None:
        """End the call."""
        self._inside = False

    def fail(self, *, ahead: bool = False) -> None:
        """Note an error that has been published: ranks that still wait in this call will wait in vain.

        Args:
            ahead: in the next call too: the error came after the last message of this one.
        """
        self._has_failed = True
        for number in (self.number, self.number + 1)[: 1 + ahead]:
            _try(lambda store, number=number: store.set(self._key("left", number), str(self._rank)))  # type: ignore[misc]

    def close(self) -> None:
        """Let ranks that wait for this one know that it makes no more calls in this world."""
        _try(lambda store: store.set(self._key("closed", self._rank), self.here.to_json()))

    def wait(self, work: Work, *, in_control_group: bool = False) -> None:
        """Wait for a collective on the CPU; look around from time to time.

        Args:
            work: the collective.
            in_control_group: of this world alone; others go through groups that later worlds use as well.

        Raises:
            RankFailedError: another rank has ended, or has left this call with an error.
            RanksDifferError: another rank has called something else.
            WorldError: another rank has not come before the time-out.
        """

        def wait(patience: timedelta) -> bool:
            try:
                work.wait(patience)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it has come, or has broken, in between
            return True

        try:
            self._wait(wait, in_control_group=in_control_group)
        except RuntimeError as error:
            if not in_control_group:
                _LEFT_MESSAGES[default_group()] = str(self.here)
            if isinstance(error, WorldError):
                raise
            raise self.cause_of(error) from error

    def cause_of(self, error: BaseException) -> WorldError:
        """Return the error to raise in place of what torch raised because a connection to another rank broke.

        It carries the error of the rank that failed first, or names the rank that ended.
        """
        for _ in range(_NUM_LOOKS_FOR_CAUSE):
            if cause := self._cause():
                return cause
            threading.Event().wait(_BETWEEN_LOOKS_SECONDS)
        if self._has_timed_out:
            return self._late_ranks()
        who = f"rank {1 - self._rank}" if self._size == 2 else "another rank"  # noqa: PLR2004
        message = (
            f"the connection to {who} broke, and no rank has reported why: it was killed, its program was over before "
            "this one's (loaders of different lengths: wrap them in ab.shares), the network failed, or it took longer "
            f"than the process group's time-out. {self._waited_in()} "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200]})"
        )
        return RankFailedError(message, step=self._step)

    def _cause(self) -> WorldError | None:
        """Return why another rank does not come, as far as that is known by now."""
        # The rank that saw a deadlock first may have ended, and its connections, before this one looked again.
        if deadlocked := self._deadlocks.published(self.number):
            return self._apart(deadlocked)
        failure: RankFailure | None = None
        with suppress(RuntimeError, ValueError):  # the store went with its rank
            failure = self.published()
        if failure is None and self.next_has_ended:
            assert self.keep_alive is not None
            failure = RankFailure.of_ended(self.keep_alive.next_rank, self._step)
            with suppress(RuntimeError, ValueError):
                self.publish(failure)
        if failure is not None and failure.error_type == RanksDifferError.__name__:  # true of all ranks
            return RanksDifferError(failure.reason, step=self._step)
        if failure is not None and failure.rank == self._rank:
            return failure.error(f"the other ranks stopped after an error of this one: {failure}. {_START_AGAIN}")
        if failure is not None:
            return failure.error(f"{failure}. {self._waited_in()}")
        if closed := self._closed():
            return self._apart(closed)
        return None

    def _closed(self) -> list[str]:
        """Return where ranks stand if one of them closed its engine before it came to this call; else nothing."""
        if not self._inside:
            return []
        gone = []
        for rank in range(self._size):
            if text := self._read("closed", rank):
                last = Whereabouts.from_json(text)
                if last.number < self.number:
                    gone.append(f"rank {rank} closed or dropped its engine after {last.name}{_at(last.step)}")
            elif _read(f"{_ENDED_KEY}/{rank}"):
                gone.append(f"rank {rank} closed or dropped all its engines")
        return [str(self.here), *gone] if gone else []

    def _waited_in(self) -> str:
        place = f" in {self._name}{_at(self._step)}" if self._inside else ""
        return f"Rank {self._rank} waited for it{place}, and stops too."

    def _late_ranks(self) -> WorldError:
        """Return the error for ranks that are alive, as far as is known, and have not come before the time-out."""
        come = {
            rank
            for rank in range(self._size)
            if (text := self._read("at", rank)) and Whereabouts.from_json(text).number == self.number
        }
        late = [rank for rank in range(self._size) if rank not in come | {self._rank}]
        ranks = f"rank {', '.join(map(str, late))}" if late else "another rank"
        self._out_of_step = str(self.here)
        message = (
            f"{ranks} has not come to {self._name}{_at(self._step)} within {self._timeout_seconds:g} seconds: "
            f"it is slow, hangs, or called nothing. Rank {self._rank} has waited there. Every rank must call it at the "
            "same place of its program; for slow ranks raise World.from_environment(timeout_seconds=...)."
        )
        return WorldError(message)

    def leave_with(self, ranks: Sequence[int]) -> list[int]:
        """Wait a while until others leave the effective batch too; return those that have not.

        Args:
            ranks: those that run one model together, with this one.
        """
        self._num_left += 1
        store, where = default_store(), f"leaves_{self._num_left}"
        keys = {rank: self._key(f"{where}/{rank}", self.number) for rank in ranks}
        store.set(keys[self._rank], "1")
        try:
            store.wait(list(keys.values()), timedelta(seconds=_LEAVING_SECONDS))
        except RuntimeError:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if missing:
                self._out_of_step = str(self.here)
            return missing
        return []

    def publish(self, failure: RankFailure, *, ahead: bool = False) -> bool:
        """Write this rank's error for ranks that will only see a broken connection; the first one written stays.

        Args:
            failure: the error.
            ahead: the others have come through this call, and will wait in the next one.

        Returns:
            Whether it stays: no rank has published one before.
        """
        store = default_store()
        # One indivisible operation, so that of several ranks that fail at once exactly one publishes its error.
        kept = store.compare_set(self._failure_key(), "", failure.to_json())
        if ahead:
            store.compare_set(self._key("failure", self.number + 1), "", failure.to_json())
        return RankFailure.from_json(kept.decode()).rank == self._rank

    def published(self) -> RankFailure | None:
        """Return what any rank has written about its error in this call."""
        store, key = default_store(), self._failure_key()
        return RankFailure.from_json(store.get(key).decode()) if store.check([key]) else None

    def align(self, numbers: "list[int]") -> None:
        """Count on from the highest number: ranks have met in an error and begin their next calls together."""
        self.number = max(numbers)

    def _wait_in_store(self, store: Store, key: str) -> None:
        if store.add(f"{key}/count", 1) == self._size:
            store.set(key, "1")

        def wait(patience: timedelta) -> bool:
            try:
                store.wait([key], patience)
            except RuntimeError:
                return store.check([key])
            return True

        self._wait(wait, announce=True)

    def _wait(
        self, wait: Callable[[timedelta], bool], *, announce: bool = False, in_control_group: bool = True
    ) -> None:
        patience, was_left, left_seconds = _FIRST_PATIENCE_SECONDS, False, self._timeout_seconds
        self._has_timed_out = False
        self._deadlocks.begin_wait(in_control_group=in_control_group)
        if announce:
            _try(lambda store: store.set(self._key("at", self._rank), self.here.to_json()))
        while not wait(timedelta(seconds=patience)):
            was_left = self._look_around(was_left=was_left)
            left_seconds -= patience
            if left_seconds <= 0:
                raise self._late_ranks()
            patience = min(2 * patience, _MOST_PATIENCE_SECONDS) if not was_left else _FIRST_PATIENCE_SECONDS
            # Torch's own time-out may end the next wait a little earlier.
            self._has_timed_out = patience >= left_seconds
            patience = min(patience, left_seconds)

    def _look_around(self, *, was_left: bool) -> bool:
        """Return whether another rank has left this call with an error.

        Args:
            was_left: whether it had when this rank looked before: what that rank had sent has arrived since.

        Raises:
            RankFailedError: it had, and nothing has come; or the next rank has ended.
            RanksDifferError: another rank has called something else.
        """
        self._check_keep_alive()
        if not self._inside:  # a message between calls, such as a vote
            return False
        here = self.here
        _try(lambda store: store.set(self._key("at", self._rank), here.to_json()))
        others = [self._read("at", rank) for rank in range(self._size) if rank != self._rank]
        found = [Whereabouts.from_json(text) for text in others if text]
        left = self._read("left", self.number)
        is_left = bool(left) and int(left) != self._rank
        # A rank that looks for the others after an error has published a better reason.
        if any(other.contradicts(here) for other in found) and not (
            is_left and all(o.name == here.name for o in found)
        ):
            at_call = [here, *(other for other in found if other.number == here.number)]
            raise self._apart([str(one) for one in sorted(at_call, key=lambda one: one.rank)])
        if is_left and was_left:
            self._out_of_step = str(here)
            raise self._cause() or AssertionError("a rank publishes its error before it leaves")
        if deadlocked := self._deadlocks.poll(self.number, str(here)):
            raise self._apart(deadlocked)
        if self._closed() and (cause := self._cause()):
            raise cause
        return is_left

    def _check_keep_alive(self) -> None:
        """Raise where the next rank has been found gone several times: what it had sent before has arrived since.

        Raises:
            RankFailedError: it has ended, or its host does not answer any more.
        """
        self._times_broken = self._times_broken + 1 if self.next_has_ended else 0
        if self._times_broken > _MOST_TIMES_BROKEN and (cause := self._cause()):
            leave_groups_alone()
            raise cause

    def _apart(self, stands: Sequence[str]) -> RanksDifferError:
        """Return the error for ranks in different calls; what they called tells why, or only that they lost step.

        Args:
            stands: clauses that say where ranks are, by rank.
        """
        self._out_of_step = str(self.here)
        names = {stand.partition(" called ")[2].partition(" at step ")[0] for stand in stands}
        remedy = (
            "Every rank must build engines and call engine.step, evaluate, save, load and close at the same place of "
            "its program: take `if rank == 0` away from around them (ranks agree on who writes a checkpoint), and wrap "
            "loaders of different lengths in ab.shares."
            if len(names) > 1
            else "An error on one of them was caught there while the others went on: start again from a checkpoint."
        )
        message = f"ranks wait for each other in different calls: {'; '.join(stands)}. {remedy}"
        return RanksDifferError(message, step=self._step, meant=tuple(stands))

    def _failure_key(self) -> str:
        # What fails between two calls is found by those that wait in the next one.
        return self._key("failure", self.number if self._inside or self._has_failed else self.number + 1)

    def _key(self, kind: str, number: int) -> str:
        return f"{_PREFIX}/{self._world_name}/{kind}/{number}"

    def _read(self, kind: str, number: int) -> str:
        return _read(self._key(kind, number))


def say_ended(rank: int) -> None:
    """Let ranks that wait for this one know that it ends the default group, with all its engines."""
    default_store().set(f"{_ENDED_KEY}/{rank}", "1")


def _try(act: Callable[[Store], object]) -> None:
    # The store may have gone with its rank: then the connections will break soon.
    with suppress(RuntimeError, ValueError):
        act(default_store())


def _read(key: str) -> str:
    found: list[str] = []
    _try(lambda store: found.append(store.get(key).decode() if store.check([key]) else ""))
    return found[0] if found else ""


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def default_group() -> "dist.ProcessGroup":
    """Return torch's default group, which control groups are made within."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
