"""Desync detection: ranks number their calls alike, so a waiting rank can tell that a peer is in another one.

Nothing is written while ranks are in step. A rank that has waited for a while writes its position to the store, reads
the others' positions, and keeps waiting if they may still come: a slow rank never counts as a failed one.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol, Self
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anybatch.errors import RankFailedError, RanksDifferError, UserError, WorldError
from anybatch.parallel.rank_failure import DeadlockDetector, RankFailure, act_on_store, has_ended, own_host, read_store
from anybatch.parallel.torch_internals import Store, default_store, leave_groups_alone

_PREFIX = "anybatch/roll_call"
_ENDED_KEY = "anybatch/ended"
_PROCESS_KEY = "anybatch/process"
_FIRST_PATIENCE_SECONDS = 0.5
_MOST_PATIENCE_SECONDS = 4.0
_LEAVING_SECONDS = 4.0
_LEFT_MESSAGES: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""By default group, a message of this rank without an answer: the next message would be paired with it."""
_MAX_TIMES_ENDED = 2
"""Checks in a row that may find a rank gone without an error: its last message may be in flight."""
_NUM_LOOKS_FOR_CAUSE, _BETWEEN_LOOKS_SECONDS = 20, 0.1
"""How often a rank with a broken connection looks for the cause, which other ranks may publish a little later."""
_START_AGAIN = "Start all ranks again, from the last checkpoint."
NUM_DIGESTS = 4
"""Digests of the call, the batch, the settings and the replicas."""


class Work(Protocol):
    """Pending work: a message of ours, or a collective of torch, with the same `wait`."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait; raise a RuntimeError on failure or timeout."""

    def is_completed(self) -> bool:
        """Whether it has arrived or failed."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A rank's position in the sequence of calls, which all ranks number alike.

    `step` is from 0 on, None between steps; `phase` names what the rank compares, if not all calls of this name do;
    `num_waits` counts how often the rank has waited for the others in this call.
    """

    rank: int
    number: int
    name: str
    step: int | None
    barrier: bool
    phase: str = ""
    num_waits: int = 0

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse a text from `to_json`."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return it as text for a store."""
        return json.dumps(asdict(self))

    def contradicts(self, other: "Whereabouts") -> bool:
        """Whether the two ranks wait for each other forever. If call numbers differ, one is only early or late."""
        if self.number != other.number:
            return False
        mine = self.name, self.step, self.barrier
        # A rank that has waited less often may still come to the same phase.
        is_elsewhere = self.num_waits == other.num_waits and self.phase != other.phase
        return mine != (other.name, other.step, other.barrier) or is_elsewhere

    def __str__(self) -> str:
        """Return it as a clause."""
        return f"rank {self.rank} called {self.name}{_at(self.step)}{self.phase and f' and compares {self.phase}'}"


class RollCall:
    """This rank's current call, and its view of the other ranks. One for each control group.

    `world_name` is the same on all ranks and unique to the group; `timeout` limits the wait for ranks to reach a call.
    `digests` are of this rank's call, batch, settings and replica in this step, and `shards_digest` of its shards of
    weights, the same in one data group; each is below 2**20. `has_agreed`: the last message of the step has been sent,
    so other ranks wait for nothing more. `has_hooks`, `any_hooks`: this or any rank runs user hooks on the summed
    gradients of this step. `num_told` counts the errors that all ranks have received together.
    """

    def __init__(self, world_name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._world_name = world_name
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout.total_seconds()
        self._times_ended = 0
        self._deadlocks = DeadlockDetector(world_name, rank, size)
        self.number = 0
        self._name = ""
        self._step: int | None = None
        self._phase, self._num_waits = "", 0
        self._inside = False
        self._has_failed = False
        self._barrier = False
        self._out_of_step = _LEFT_MESSAGES.get(default_group(), "")
        self.digests: tuple[int, ...] = (0,) * NUM_DIGESTS
        self.has_agreed = self.has_hooks = self.any_hooks = False
        self.num_told = 0
        self.shards_digest = 0
        self._num_left = 0
        self._has_timed_out = False
        act_on_store(lambda store: store.set(f"{_PROCESS_KEY}/{rank}", json.dumps([*own_host(), os.getpid()])))

    @property
    def is_inside(self) -> bool:
        """Whether this rank is in a call."""
        return self._inside

    @property
    def ended_ranks(self) -> list[int]:
        """The ranks on this host whose processes have ended without closing their engines."""
        ended = [rank for rank in range(self._size) if has_ended(read_store(f"{_PROCESS_KEY}/{rank}"))]
        return [rank for rank in ended if not self._read("closed", rank) and not read_store(f"{_ENDED_KEY}/{rank}")]

    @property
    def here(self) -> Whereabouts:
        """This rank's position."""
        return Whereabouts(self._rank, self.number, self._name, self._step, self._barrier, self._phase, self._num_waits)

    def enter(self, name: str, step: int | None, *, barrier: bool) -> None:
        """Begin a call that every rank has to make. Sends nothing.

        With `barrier`, `wait_at_barrier` waits for all ranks, for rare calls. `step` is None between steps. Raise a
        `UserError` if this rank is in a call already.
        """
        if self._inside:
            message = (
                f"{name} was called while {self._name} runs: from inside it (a loss function, hook or observer), or "
                "from another thread. Call one after the other, from one thread."
            )
            raise UserError(message)
        # After an error ranks may be out of step: they synchronise before they send anything.
        self.number, self._name, self._step, self._barrier = self.number + 1, name, step, barrier or self._has_failed
        self._inside, self._has_failed, self.has_agreed = True, False, False
        self._phase, self._num_waits = "", 0

    def wait_at_barrier(self) -> None:
        """If this call is a barrier, wait through the store until all ranks are in it.

        So no message of one call can be paired with another call's. Raise a `WorldError` with the reason if another
        rank does not come; or if this rank has abandoned a message that the others still wait for.
        """
        if self._out_of_step:
            message = (
                f"{self._name} cannot run, because ranks cannot be brought together again after an earlier error "
                f"({self._out_of_step}). {_START_AGAIN}"
            )
            raise WorldError(message)
        if not self._barrier:
            return
        try:
            # Includes name and step, so that ranks in different calls do not meet, and report it.
            self._wait_in_store(default_store(), f"{self._key('met', self.number)}/{self._name}/{self._step}")
        except WorldError:
            raise
        except (RuntimeError, ValueError):
            # The launcher has ended, and its store too. If all ranks are here, they can still save.
            return

    @contextmanager
    def comparing(self, phase: str) -> Iterator[None]:
        """Name what this rank compares with the others, in a part of a call that ranks could enter at different times.

        `phase` names it, such as "the first samples of a data set".
        """
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""

    def leave(self) -> None:
        """End the call."""
        self._inside = False

    def fail(self, *, ahead: bool = False) -> None:
        """Record a published error: ranks that still wait in this call will get no message.

        With `ahead` also in the next call: the error came after the last message of this one.
        """
        self._has_failed = True
        for number in (self.number, self.number + 1)[: 1 + ahead]:
            act_on_store(lambda store, number=number: store.set(self._key("left", number), str(self._rank)))  # type: ignore[misc]

    def close(self) -> None:
        """Inform ranks that wait for this one that it makes no more calls in this world."""
        act_on_store(lambda store: store.set(self._key("closed", self._rank), self.here.to_json()))

    def wait(self, work: Work, *, in_control_group: bool = False) -> None:
        """Wait for a collective on the CPU, and check on the other ranks from time to time.

        `in_control_group` is whether the collective belongs to this world alone; other groups serve later worlds too.
        Raise a `WorldError` with the reason if another rank does not come: see `_cause` and `_late_ranks`.
        """

        def wait(patience: timedelta) -> bool:
            try:
                work.wait(patience)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # it has arrived, or failed, in between
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
        """Return the error to raise in place of torch's error about a broken connection.

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
        """Return why another rank does not come, if known."""
        # The rank that detected a deadlock may have ended, and its connections, before this one looked again.
        if deadlocked := self._deadlocks.published(self.number):
            return self._apart(deadlocked)
        failure: RankFailure | None = None
        with suppress(RuntimeError, ValueError):  # the store's host ended
            failure = self.published()
        if failure is None and (ended := self.ended_ranks):
            failure = RankFailure.of_ended(ended[0], self._step)
            with suppress(RuntimeError, ValueError):
                self.publish(failure)
        if failure is not None and failure.error_type == RanksDifferError.__name__:  # true on all ranks
            return RanksDifferError(failure.reason, step=self._step)
        if failure is not None and failure.rank == self._rank:
            return failure.error(f"the other ranks stopped after an error of this one: {failure}. {_START_AGAIN}")
        if failure is not None:
            return failure.error(f"{failure}. {self._waited_in()}")
        if closed := self._closed():
            return self._apart(closed)
        return None

    def _closed(self) -> list[str]:
        """Return the ranks' positions if one of them closed its engine before this call; otherwise nothing."""
        if not self._inside:
            return []
        gone = []
        for rank in range(self._size):
            if text := self._read("closed", rank):
                last = Whereabouts.from_json(text)
                if last.number < self.number:
                    gone.append(f"rank {rank} closed or dropped its engine after {last.name}{_at(last.step)}")
            elif read_store(f"{_ENDED_KEY}/{rank}"):
                gone.append(f"rank {rank} closed or dropped all its engines")
        return [str(self.here), *gone] if gone else []

    def _waited_in(self) -> str:
        place = f" in {self._name}{_at(self._step)}" if self._inside else ""
        return f"Rank {self._rank} waited for it{place}, and stops too."

    def _late_ranks(self) -> WorldError:
        """Return the error for ranks that seem alive, and have not come before the timeout."""
        come = {
            rank
            for rank in range(self._size)
            if (text := self._read("at", rank)) and Whereabouts.from_json(text).number == self.number
        }
        leave_groups_alone()  # a host that is gone closes no connection
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
        """Wait a while for the ranks that run one model together to leave the effective batch; return who has not."""
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
        """Publish this rank's error for ranks that will only see a broken connection; return whether it is the first.

        The first published error stays. With `ahead`, the others have completed this call, and will wait in the next
        one.
        """
        store = default_store()
        # One atomic operation, so that exactly one of several failing ranks publishes its error.
        kept = store.compare_set(self._failure_key(), "", failure.to_json())
        if ahead:
            store.compare_set(self._key("failure", self.number + 1), "", failure.to_json())
        return RankFailure.from_json(kept.decode()).rank == self._rank

    def published(self) -> RankFailure | None:
        """Return the failure that a rank has published in this call, if any."""
        store, key = default_store(), self._failure_key()
        return RankFailure.from_json(store.get(key).decode()) if store.check([key]) else None

    def align(self, numbers: "list[int]") -> None:
        """Continue from the highest call number: ranks have met in an error and begin their next calls together."""
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
            act_on_store(lambda store: store.set(self._key("at", self._rank), self.here.to_json()))
        while not wait(timedelta(seconds=patience)):
            was_left = self._peer_has_failed(was_left=was_left)
            left_seconds -= patience
            if left_seconds <= 0:
                raise self._late_ranks()
            patience = min(2 * patience, _MOST_PATIENCE_SECONDS) if not was_left else _FIRST_PATIENCE_SECONDS
            # Torch's own timeout may end the next wait a little earlier.
            self._has_timed_out = patience >= left_seconds
            patience = min(patience, left_seconds)
        self._num_waits += 1

    def _peer_has_failed(self, *, was_left: bool) -> bool:
        """Return whether another rank has left this call with an error.

        `was_left`: it had left at the last check already, so everything that it sent has arrived since. Then, or if a
        rank has ended or made a different call, raise the `WorldError` with that reason.
        """
        self._raise_if_ended()
        if not self._inside:  # a message between calls, such as a vote
            return False
        here = self.here
        act_on_store(lambda store: store.set(self._key("at", self._rank), here.to_json()))
        others = [self._read("at", rank) for rank in range(self._size) if rank != self._rank]
        found = [Whereabouts.from_json(text) for text in others if text]
        left = self._read("left", self.number)
        is_left = bool(left) and int(left) != self._rank
        # A rank that resynchronises after an error has published a better reason.
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

    def _raise_if_ended(self) -> None:
        """Raise a `RankFailedError` if a rank was found gone repeatedly, so that its last data has arrived."""
        self._times_ended = self._times_ended + 1 if self.ended_ranks else 0
        if self._times_ended > _MAX_TIMES_ENDED and (cause := self._cause()):
            raise cause

    def _apart(self, stands: Sequence[str]) -> RanksDifferError:
        """Return the error for ranks in different calls; `stands` are clauses with their positions, in rank order."""
        self._out_of_step = str(self.here)
        names = {stand.partition(" called ")[2].partition(" at step ")[0] for stand in stands}
        remedy = (
            "Every rank must build engines and call engine.step, evaluate, save, load and close at the same place of "
            "its program: remove `if rank == 0` around them (ranks agree on who writes a checkpoint), and wrap "
            "loaders of different lengths in ab.shares."
            if len(names) > 1
            else "An error on one of them was caught there while the others continued: start again from a checkpoint."
        )
        message = f"ranks wait for each other in different calls: {'; '.join(stands)}. {remedy}"
        return RanksDifferError(message, step=self._step, meant=tuple(stands))

    def _failure_key(self) -> str:
        # Failures between two calls are found by the ranks that wait in the next one.
        return self._key("failure", self.number if self._inside or self._has_failed else self.number + 1)

    def _key(self, kind: str, number: int) -> str:
        return f"{_PREFIX}/{self._world_name}/{kind}/{number}"

    def _read(self, kind: str, number: int) -> str:
        return read_store(self._key(kind, number))


def announce_end(rank: int) -> None:
    """Inform ranks that wait for this one that it ends the default group, with all its engines."""
    default_store().set(f"{_ENDED_KEY}/{rank}", "1")


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def default_group() -> "dist.ProcessGroup":
    """Return torch's default group, the parent of control groups."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
