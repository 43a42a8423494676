"""Desync detection: all ranks number their calls, so a waiting rank can tell that another rank is in a different call.

A rank that has waited for a while writes its position to torch's key-value store, reads the positions of other ranks,
and keeps waiting if they may still reach its call: a slow rank never counts as failed. Short waits write nothing.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from anybatch.errors import RankFailedError, RanksDifferError, UserError, WorldError
from anybatch.parallel.rank_failure import RankFailure, has_ended, host_id, read_store, write_store
from anybatch.parallel.torch_internals import Store, default_store, leak_process_groups

_PREFIX = "anybatch/call_tracker"
_ENDED_KEY = "anybatch/ended"
_PROCESS_KEY = "anybatch/process"
_MISSED_KEY = "anybatch/missed"
_MAX_TIMES_ENDED = 2
"""Maximum consecutive checks that may find a rank's process ended without an error: a message may be in flight."""
_FIRST_INTERVAL_SECONDS = 0.5
_MAX_INTERVAL_SECONDS = 4.0
_UNANSWERED_MESSAGES: "WeakKeyDictionary[dist.ProcessGroup, str]" = WeakKeyDictionary()
"""Default group -> the call of an unanswered message of this rank, with which the next message would be paired."""
_MIN_REPEATED_POLLS = 2
"""A deadlock is certain once a rank has published one wait in another world this often during one wait of this rank."""
_NUM_CAUSE_CHECKS, _CAUSE_CHECK_SECONDS = 20, 0.1
"""Number and interval of checks for the cause of a broken connection, which another rank may publish a little later."""
_RESTART = "Start all ranks again, from the last checkpoint."
NUM_DIGESTS = 4
"""Number of checksums (digests) in the message of a step: of the call, the batch, the settings and the weights."""


class Work(Protocol):
    """Pending work: a message of ours, or a collective of torch, with the same `wait`."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait; raise a RuntimeError on failure or timeout."""

    def is_completed(self) -> bool:
        """Whether the work has completed or failed."""


@dataclass(frozen=True, slots=True)
class CallPosition:
    """A rank's position in the sequence of calls of a world, which all ranks number in the same way.

    `phase` describes the data that the rank compares with other ranks, in calls where only some ranks may compare;
    `num_waits` counts the waits for other ranks in this call, and `num_polls` the checks on them in the present wait.
    """

    world: str
    rank: int
    number: int
    name: str
    step: int | None
    barrier: bool
    phase: str = ""
    num_waits: int = 0
    num_polls: int = 0

    def contradicts(self, other: "CallPosition") -> bool:
        """Whether the two ranks wait for each other forever. If call numbers differ, one rank is only early or late."""
        if (self.world, self.number) != (other.world, other.number):
            return False
        call = self.name, self.step, self.barrier
        # A rank that has waited less often may still reach the same phase.
        is_elsewhere = self.num_waits == other.num_waits and self.phase != other.phase
        return call != (other.name, other.step, other.barrier) or is_elsewhere

    def __str__(self) -> str:
        """Return the position as a clause."""
        return f"rank {self.rank} called {self.name}{_at(self.step)}{self.phase and f' and compares {self.phase}'}"


class CallTracker:
    """This rank's current call, and its view of the other ranks. One for each control group.

    `digests`: checksums of this rank's call, batch, settings and weights in this step. `has_agreed`: whether the last
    message of the step has been sent, so that no other rank waits for this rank. `has_hooks`, `any_hooks`: whether this
    rank, or any rank, runs user hooks on the summed gradients of this step.
    """

    def __init__(self, world_name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._world_name = world_name
        self._rank = rank
        self._size = size
        self._timeout_seconds = timeout.total_seconds()
        self.number = 0
        self._name = ""
        self._step: int | None = None
        self._phase, self._num_waits, self._num_polls = "", 0, 0
        self._first_polls: dict[CallPosition, int] = {}
        self._inside = False
        self._has_failed = False
        self._barrier = False
        self._out_of_step = _UNANSWERED_MESSAGES.get(default_group(), "")
        self.digests: tuple[int, ...] = (0,) * NUM_DIGESTS
        self.has_agreed = self.has_hooks = self.any_hooks = False
        self._has_timed_out = False
        self._times_ended = 0
        write_store(f"{_PROCESS_KEY}/{rank}", json.dumps([*host_id(), os.getpid()]))

    @property
    def is_inside(self) -> bool:
        """Whether this rank is in a call."""
        return self._inside

    @property
    def position(self) -> CallPosition:
        """This rank's position."""
        position = self._world_name, self._rank, self.number, self._name, self._step, self._barrier
        return CallPosition(*position, self._phase, self._num_waits, self._num_polls)

    def enter(self, name: str, step: int | None, *, barrier: bool) -> None:
        """Begin a call that every rank must make, without communication; raise a `UserError` if another call runs.

        With `barrier`, `wait_at_barrier` waits for all ranks, for rare calls. `step` is None between steps.
        """
        if self._inside:
            message = (
                f"{name} was called while {self._name} runs: from inside it (a loss function, hook or observer), or "
                "from another thread. Make these calls one after the other, in one thread."
            )
            raise UserError(message)
        # After an error ranks may be out of step: they synchronise before they send anything.
        self.number, self._name, self._step, self._barrier = self.number + 1, name, step, barrier or self._has_failed
        self._inside, self._has_failed, self.has_agreed = True, False, False
        self._phase, self._num_waits = "", 0

    def wait_at_barrier(self) -> None:
        """If this call is a barrier, wait in the store for all ranks, so that messages of two calls are never paired.

        Raise a `WorldError` with the reason if another rank does not reach the barrier, or if this rank has abandoned a
        message that other ranks still wait for.
        """
        if self._out_of_step:
            message = (
                f"{self._name} cannot run, because ranks are out of step after an earlier error "
                f"({self._out_of_step}). {_RESTART}"
            )
            raise WorldError(message)
        if not self._barrier:
            return
        try:
            # The key has name and step, so ranks in different calls use different keys, and report the desync.
            self._wait_in_store(default_store(), f"{self._key('met', self.number)}/{self._name}/{self._step}")
        except WorldError:
            raise
        except (RuntimeError, ValueError):
            # The launcher has ended, and its store too. If all ranks are in this call, they can still save.
            return

    @contextmanager
    def comparing(self, phase: str) -> Iterator[None]:
        """Record the data that this rank compares with other ranks, in a part of a call that some ranks may skip."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""

    def leave(self) -> None:
        """End the call."""
        self._inside = False

    def abandon(self) -> None:
        """Refuse further calls: this rank has abandoned collectives in which other ranks may wait."""
        _UNANSWERED_MESSAGES[default_group()] = self._out_of_step = str(self.position)

    def fail(self, *, ahead: bool = False) -> None:
        """Record a published error: ranks that still wait in this call will get no message.

        With `ahead`, they get no message in the next call either: the error came after this call's last message.
        """
        self._has_failed = True
        for number in (self.number, self.number + 1)[: 1 + ahead]:
            write_store(self._key("left", number), str(self._rank))

    def close(self) -> None:
        """Inform waiting ranks that this rank makes no more calls in this world."""
        write_store(self._key("closed", self._rank), _to_json(self.position))

    def wait(self, work: Work, *, in_control_group: bool = False) -> None:
        """Wait for a collective on the CPU; raise a `WorldError` with the reason if another rank is missing.

        `in_control_group`: the collective is in the group of this world; the default group serves later worlds too.
        """

        def wait(timeout: timedelta) -> bool:
            try:
                work.wait(timeout)
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # completed or failed since the timeout
            return True

        try:
            self._wait(wait)
        except RuntimeError as error:
            if not in_control_group:
                _UNANSWERED_MESSAGES[default_group()] = str(self.position)
            if isinstance(error, WorldError):
                raise
            raise self.cause_of(error) from error

    def cause_of(self, error: BaseException) -> WorldError:
        """Return the error of the rank that failed or ended, to raise instead of torch's "connection closed" error."""
        for _ in range(_NUM_CAUSE_CHECKS):
            if cause := self._cause():
                return cause
            threading.Event().wait(_CAUSE_CHECK_SECONDS)
        if self._has_timed_out:
            return self._timeout_error()
        who = f"rank {1 - self._rank}" if self._size == 2 else "another rank"  # noqa: PLR2004
        message = (
            f"the connection to {who} broke, and no rank has reported why. That rank was killed or ended early "
            "(loaders of different lengths: wrap them in ab.shares), the network failed, or a collective took longer "
            f"than the process group's timeout. {self._waited_in()} ({type(error).__name__}: "
            f"{str(error).splitlines()[0][:200]})"
        )
        return RankFailedError(message, step=self._step)

    def _cause(self) -> WorldError | None:
        """Return the error that explains why another rank is missing, if the reason is known."""
        failure = self.published()
        if failure is not None and failure.error_type == RanksDifferError.__name__:  # true on all ranks
            return RanksDifferError(failure.reason, step=self._step)
        if failure is not None and failure.rank == self._rank:
            return failure.error(f"the other ranks stopped after an error of this rank: {failure}. {_RESTART}")
        if failure is not None:
            return failure.error(f"{failure}. {self._waited_in()}")
        if ended := self._ended():
            # Ranks that noticed the end may have ended too, so all report the same rank: the first one that was missed.
            with suppress(RuntimeError, ValueError):  # the store's host ended
                ended = [int(default_store().compare_set(_MISSED_KEY, "", str(ended[0])))]
            message = (
                f"rank {ended[0]} has ended without an error: it was killed, or its program ended before other ranks "
                f"(loaders of different lengths: wrap them in ab.shares). {self._waited_in()}"
            )
            return RankFailedError(message, rank=ended[0], step=self._step)
        if closed := self._closed_clauses():
            return self._desync_error(closed)
        return None

    def _ended(self) -> list[int]:
        """Return the ranks on this host whose processes have ended without closing their engines."""
        ended = [rank for rank in range(self._size) if has_ended(read_store(f"{_PROCESS_KEY}/{rank}"))]
        return [rank for rank in ended if not self._read("closed", rank) and not read_store(f"{_ENDED_KEY}/{rank}")]

    def _closed_clauses(self) -> list[str]:
        """Return clauses with this rank's position and the ranks that closed their engines before this call, if any."""
        if not self._inside:
            return []
        clauses = []
        for rank in range(self._size):
            if text := self._read("closed", rank):
                last = CallPosition(**json.loads(text))
                if last.number < self.number:
                    clauses.append(f"rank {rank} closed or dropped its engine after {last.name}{_at(last.step)}")
            elif read_store(f"{_ENDED_KEY}/{rank}"):
                clauses.append(f"rank {rank} closed or dropped all its engines")
        return [str(self.position), *clauses] if clauses else []

    def _waited_in(self) -> str:
        call = f" in {self._name}{_at(self._step)}" if self._inside else ""
        return f"Rank {self._rank} waited for it{call}, and stops too."

    def _timeout_error(self) -> WorldError:
        """Return the error for ranks that have not made this call before the timeout, but seem to be running."""
        here = {p.rank for p in self._positions() if (p.world, p.number) == (self._world_name, self.number)}
        leak_process_groups()  # a host that has crashed closes no connection
        late = [rank for rank in range(self._size) if rank not in here | {self._rank}]
        ranks = f"rank {', '.join(map(str, late))}" if late else "another rank"
        self._out_of_step = str(self.position)
        message = (
            f"{ranks} has not called {self._name}{_at(self._step)} within {self._timeout_seconds:g} seconds: it is "
            f"slow, hangs, or makes no more calls. Rank {self._rank} has waited for it. Every rank must call it at "
            "the same point of its program; for slow ranks raise World.from_environment(timeout_seconds=...)."
        )
        return WorldError(message)

    def publish(self, failure: RankFailure, *, ahead: bool = False) -> bool:
        """Publish this rank's error, unless another rank has published one before; return whether it is the first.

        With `ahead`, other ranks have completed this call, and will wait in the next call.
        """
        store = default_store()
        # One atomic operation, so that exactly one of several failing ranks publishes its error.
        kept = store.compare_set(self._failure_key(), "", _to_json(failure))
        if ahead:
            store.compare_set(_failure_key(self._world_name, self.number + 1), "", _to_json(failure))
        return RankFailure(**json.loads(kept)).rank == self._rank

    def published(self) -> RankFailure | None:
        """Return the failure that a rank has published in this call, if any."""
        text = read_store(self._failure_key())
        return RankFailure(**json.loads(text)) if text else None

    def align(self, numbers: "list[int]") -> None:
        """Continue from the highest call number of all ranks, after they have synchronised because of an error."""
        self.number = max(numbers)

    def _wait_in_store(self, store: Store, key: str) -> None:
        if store.add(f"{key}/count", 1) == self._size:
            store.set(key, "1")

        def wait(timeout: timedelta) -> bool:
            try:
                store.wait([key], timeout)
            except RuntimeError:
                return store.check([key])
            return True

        self._wait(wait, announce=True)

    def _wait(self, wait: Callable[[timedelta], bool], *, announce: bool = False) -> None:
        interval, had_failed, left_seconds = _FIRST_INTERVAL_SECONDS, False, self._timeout_seconds
        self._has_timed_out = False
        self._num_polls, self._first_polls = 0, {}
        if announce:
            self._announce()
        while not wait(timedelta(seconds=interval)):
            had_failed = self._peer_has_failed(had_failed=had_failed)
            left_seconds -= interval
            if left_seconds <= 0:
                raise self._timeout_error()
            interval = min(2 * interval, _MAX_INTERVAL_SECONDS) if not had_failed else _FIRST_INTERVAL_SECONDS
            # Torch's own timeout may end the next wait a little earlier.
            self._has_timed_out = interval >= left_seconds
            interval = min(interval, left_seconds)
        self._num_waits += 1

    def _peer_has_failed(self, *, had_failed: bool) -> bool:
        """Return whether another rank has left this call with an error.

        `had_failed`: the last check returned True, so everything that the failed rank sent has arrived since. In that
        case, or if a rank has closed its engine or waits in a different call, raise the `WorldError` with the reason.
        """
        self._times_ended = self._times_ended + 1 if self._ended() else 0
        if self._times_ended > _MAX_TIMES_ENDED and (cause := self._cause()):
            raise cause
        if not self._inside:  # a message between calls, such as a vote
            return False
        self._num_polls += 1
        self._announce()
        here, others = self.position, self._positions()
        failed_rank = self._read("left", self.number)
        has_failed = bool(failed_rank) and int(failed_rank) != self._rank
        # After an error a rank resynchronises in another call. Its published error explains more than a desync.
        if any(other.contradicts(here) for other in others) and not (
            has_failed and all(other.name == here.name for other in others)
        ):
            in_call = [here, *(other for other in others if (other.world, other.number) == (here.world, here.number))]
            raise self._desync_error([str(position) for position in sorted(in_call, key=lambda p: p.rank)])
        if has_failed and had_failed:
            self._out_of_step = str(here)
            raise self._cause() or AssertionError("a rank publishes its error before it leaves")
        self._check_deadlock(others)
        if self._closed_clauses() and (cause := self._cause()):
            raise cause
        return has_failed

    def _announce(self) -> None:
        """Publish this rank's position."""
        write_store(f"{_PREFIX}/at/{self._rank}", _to_json(self.position))

    def _positions(self) -> list[CallPosition]:
        """Return the last published positions of the other ranks, in any world."""
        texts = [read_store(f"{_PREFIX}/at/{rank}") for rank in range(self._size) if rank != self._rank]
        return [CallPosition(**json.loads(text)) for text in texts if text]

    def _check_deadlock(self, others: Sequence[CallPosition]) -> None:
        """Raise a `RanksDifferError` if another rank waits in another world (of `ab.shares`, say) at the same time.

        The other rank would wait forever: this rank has sent its messages for all calls that it has completed.
        """
        for other in others:
            # Seen twice during one wait of each rank: a rank that is only slow would have continued in between.
            first = self._first_polls.setdefault(replace(other, num_polls=0), other.num_polls)
            if other.world != self._world_name and other.num_polls >= first + _MIN_REPEATED_POLLS:
                error = self._desync_error([str(p) for p in sorted((self.position, other), key=lambda p: p.rank)])
                text = _to_json(RankFailure.of(error, self._rank, self._step))
                with suppress(RuntimeError, ValueError):  # the store's host ended
                    default_store().compare_set(_failure_key(other.world, other.number), "", text)
                raise error
        failure = self.published()
        if failure is not None and failure.error_type == RanksDifferError.__name__:
            raise RanksDifferError(failure.reason, step=self._step)

    def _desync_error(self, clauses: Sequence[str]) -> RanksDifferError:
        """Return the error for ranks in different calls; `clauses` are their positions, in rank order."""
        self._out_of_step = str(self.position)
        names = {clause.partition(" called ")[2].partition(" at step ")[0] for clause in clauses}
        remedy = (
            "Every rank must build engines and call engine.step, evaluate, save, load and close at the same point of "
            "its program: remove `if rank == 0` around them (ranks agree on who writes a checkpoint), and wrap "
            "loaders of different lengths in ab.shares."
            if len(names) > 1
            else "One rank caught an error while other ranks continued: start again from a checkpoint."
        )
        message = f"ranks wait for each other in different calls: {'; '.join(clauses)}. {remedy}"
        return RanksDifferError(message, step=self._step, meant=tuple(clauses))

    def _failure_key(self) -> str:
        # A failure between two calls belongs to the next call, in which other ranks wait.
        number = self.number if self._inside or self._has_failed else self.number + 1
        return _failure_key(self._world_name, number)

    def _key(self, kind: str, number: int) -> str:
        return f"{_PREFIX}/{self._world_name}/{kind}/{number}"

    def _read(self, kind: str, number: int) -> str:
        return read_store(self._key(kind, number))


def _failure_key(world_name: str, number: int) -> str:
    return f"{_PREFIX}/{world_name}/failure/{number}"


def _to_json(value: CallPosition | RankFailure) -> str:
    return json.dumps(asdict(value))


def announce_end(rank: int) -> None:
    """Inform waiting ranks that this rank ends the default group, with all its engines."""
    write_store(f"{_ENDED_KEY}/{rank}", "1")


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def default_group() -> "dist.ProcessGroup":
    """Return torch's default group, the parent of control groups."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD
