"""Process groups with an owner that ends them without leftovers.

A gloo group has two or three threads, which wake a hundred times a second, and a socket to every other rank. torch
keeps each group in a global table until `destroy_process_group`, so a group that is only dropped stays.
"""

import os
import secrets
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread, main_thread

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.launchers import Launch
from anybatch.parallel.meshes import forget_meshes
from anybatch.parallel.messenger import Message, Messenger
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.roll_call import RollCall, announce_end
from anybatch.parallel.torch_internals import PrefixStore, Store, default_store, set_timeout

_JOINED_KEY = "anybatch/times_joined"
_OPEN_KEY = "anybatch/open_worlds"
_WORLDS_KEY = "anybatch/num_worlds"
_SIGNATURES_KEY = "anybatch/signatures"
_PATIENCE_SECONDS, _AT_EXIT_SECONDS = 2.0, 0.1
_CONNECTING = timedelta(seconds=45)
"""Timeout for connecting after the rendezvous: gloo does not notice a rank that has died meanwhile."""


@dataclass(slots=True)
class _GroupResources:
    """The resources of a control group that must be released.

    Attributes:
        groups: the process group; empty once it has ended.
        roll_call: informs the other ranks that this one makes no more calls.
        messengers: the message thread; empty on one rank, and once it has ended.
        owns_default_group: end the default group at the exit of the process.
        num_pending: messages that have not been waited for yet.
        process_id: id of the process that made it; forked children must not end it.
    """

    groups: list["dist.ProcessGroup"]
    roll_call: RollCall
    messengers: list[Messenger]
    owns_default_group: bool
    num_pending: int = 0
    process_id: int = field(default_factory=os.getpid)


class PendingMessage:
    """A started message between all ranks that must be waited for."""

    def __init__(self, work: Message, resources: _GroupResources, roll_call: RollCall) -> None:
        self._work = work
        self._resources = resources
        self._roll_call = roll_call
        resources.num_pending += 1

    def wait(self) -> None:
        """Wait until every rank has sent its part.

        Raises:
            RuntimeError: another rank has ended.
            RankFailedError, RanksDifferError: another rank will not send its part.
        """
        try:
            self._roll_call.wait(self._work, in_control_group=True)
        finally:
            # If this rank has stopped waiting, the message is still pending.
            if self._work.is_completed():
                self._resources.num_pending -= 1


class ControlGroup:
    """A gloo group of all ranks that ends when it is closed, garbage-collected, or at exit.

    Ending it is local: it does not wait for other ranks. Sent data still arrives, and every message needs all ranks, so
    a rank that ends the group earlier does not affect the others.

    Args:
        timeout: how long a rank waits for the others.
        owns_default_group: end the default group too, if this one is still open at the exit of the process.

    Attributes:
        name: the same on all ranks, and unique to the group.
        roll_call: the ranks' positions in the sequence of calls.
        secret: shared by all processes that can read the store; signs pickled data between ranks.
    """

    def __init__(self, timeout: timedelta, *, owns_default_group: bool = False) -> None:
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        # Ranks make their worlds in the same order, so the name is the same on all of them.
        self.name = f"world_{store.add(f'{_WORLDS_KEY}/{rank}', 1)}"
        self.roll_call = RollCall(self.name, rank, size, timeout)
        # A rank that makes one more world than the others would wait for them inside gloo, where it cannot check on
        # them.
        self.roll_call.enter("World.from_environment (ab.Engine calls it)", None, barrier=True)
        try:
            self.roll_call.wait_at_barrier()
        except WorldError as error:
            self.roll_call.publish(RankFailure.of(error, rank, None))
            self.roll_call.fail()
            raise
        finally:
            self.roll_call.leave()
        connecting = min(timeout, _CONNECTING)
        with _connecting(PrefixStore(self.name, store), rank, size, connecting):
            group = dist.new_group(backend="gloo", timeout=connecting)
            # A rank that ends its group before every rank has connected would make the others fail to connect.
            dist.all_reduce(torch.zeros(1), group=group)
            if rank == 0:
                store.set(f"{_SIGNATURES_KEY}/{self.name}", secrets.token_hex())
        self.secret = store.get(f"{_SIGNATURES_KEY}/{self.name}")
        self._rank, self._size = rank, size
        messengers = [Messenger(group, rank, size, timeout)] if size > 1 else []
        self._resources = _GroupResources([group], self.roll_call, messengers, owns_default_group)
        # Also at exit: threads of an open group may abort the process while the interpreter exits.
        self._finalizer = weakref.finalize(self, _destroy, self._resources)

    @property
    def group(self) -> "dist.ProcessGroup":
        """The process group; raises a `WorldError` if it has ended."""
        if not self._resources.groups:
            message = "this world is closed, and its ranks can no longer communicate. Create another one."
            raise WorldError(message)
        return self._resources.groups[0]

    def start_sum(self, numbers: torch.Tensor) -> PendingMessage:
        """Start replacing `numbers`, a contiguous CPU tensor, by their sum over ranks, bitwise the same on all."""
        return PendingMessage(self._messenger.start_sum(numbers), self._resources, self.roll_call)

    def gather(self, mine: bytes) -> list[bytearray]:
        """Return the bytes that every rank passed as `mine`, all of one length."""
        rows = bytearray(mine) + bytes(len(mine) * (self._size - 1))
        PendingMessage(self._messenger.start_gather(rows), self._resources, self.roll_call).wait()
        # They arrive in rank order, starting after this rank.
        places = [(rank - self._rank) % self._size * len(mine) for rank in range(self._size)]
        return [rows[place : place + len(mine)] for place in places]

    @property
    def _messenger(self) -> Messenger:
        _ = self.group  # raises if it has ended
        return self._resources.messengers[0]

    def close(self) -> bool:
        """End the group, and return whether it was open."""
        was_open = self._finalizer.alive
        self._finalizer()
        return was_open


def join_default_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    """Initialise torch.distributed for the ranks that a launcher has started; also after it was destroyed.

    A group leaves its addresses in the store, and torchrun keeps one store for the whole run: a second group under the
    same name would connect to the sockets of the first. So each join uses a new prefix in the store.

    Raises:
        torch.distributed.DistError: the store cannot be reached.
        WorldError: a rank is missing, or has ended while the ranks connected to each other.
    """
    try:
        store, rank, size = _meet(launch, timeout)
    except dist.DistNetworkError:
        # Without torchrun rank 0 hosts the store. A faster rank may have found the store of the previous group, which
        # rank 0 was about to end; the second attempt finds the right one.
        store, rank, size = _meet(launch, timeout)
    connecting = min(timeout, _CONNECTING)
    with _connecting(store, rank, size, connecting):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=connecting)
    set_timeout(timeout)
    # Marks the group as ours: `count_open_worlds` does not count in a group that the user started.
    default_store().set(f"{_OPEN_KEY}/{rank}", "0")


def count_open_worlds(change: int) -> int | None:
    """Change the number of open worlds of this rank, and return it; None if the user made the default group.

    The number is in the store of the default group, and so begins and ends with it. Worlds that are dropped without
    being closed stay in the count: garbage collection differs between ranks, but the count must not.
    """
    store = default_store()
    key = f"{_OPEN_KEY}/{dist.get_rank()}"
    return store.add(key, change) if store.check([key]) else None


def end_default_group() -> None:
    """Destroy all process groups of this process, and inform ranks that wait for it."""
    with suppress(RuntimeError, ValueError):  # the store's host ended
        announce_end(dist.get_rank())
    forget_meshes()
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    # Gloo's destructor waits for the other ranks while a collective is pending, as after some errors.
    thread = Thread(target=groups.clear, daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)


def _meet(launch: Launch, timeout: timedelta) -> tuple[Store, int, int]:
    """Wait for all ranks, and return a part of the store that no earlier group has used, the rank and the size."""
    store, rank, size = next(rendezvous(launch.init_method, launch.rank, launch.size, timeout=timeout))
    store.set_timeout(timeout)
    # Each rank counts separately; all join equally often, and so get the same number.
    number = store.add(f"{_JOINED_KEY}/{rank}", 1)
    own = PrefixStore(f"anybatch/join_{number}", store)
    own.set(f"rank_{rank}", "here")
    # Continues only after all ranks have found this store; one may have found the previous group's instead.
    keys = [f"rank_{other}" for other in range(size)]
    try:
        own.wait(keys)
    except dist.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(keys) if not own.check([key])]
        if not missing:
            raise
        message = (
            f"rank {', '.join(missing)} has not come within {timeout.total_seconds():g} seconds, so the {size} ranks "
            "of this launch cannot begin. If it has started, its output has the reason."
        )
        raise WorldError(message) from error
    return own, rank, size


@contextmanager
def _connecting(store: Store, rank: int, size: int, timeout: timedelta) -> Iterator[None]:
    """Raise a `RankFailedError` that names the ranks that have ended, if the ranks fail to connect.

    `store` must not be used for anything else; `timeout` limits the connecting.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        ended = _ended(store, rank, size)
        who = f"rank {', '.join(map(str, ended))} has ended meanwhile" if ended else "none is known to have ended"
        message = (
            f"the {size} ranks have met, but could not connect to each other within {timeout.total_seconds():g} "
            f"seconds: {who}. Rank {rank} stops too: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
        raise RankFailedError(message, rank=ended[0] if ended else None) from error


def _ended(store: Store, rank: int, size: int) -> list[int]:
    """Return the ranks that do not answer in the store; none if the store itself is gone."""
    keys = [f"lives_{other}" for other in range(size)]
    try:
        store.set(keys[rank], "1")
        with suppress(dist.DistStoreError):
            store.wait(keys, timedelta(seconds=_PATIENCE_SECONDS))
        return [other for other, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return []


def _destroy(resources: _GroupResources) -> None:
    """Destroy the group of a control group that was closed or collected, or is open at the exit of the process."""
    if os.getpid() != resources.process_id:
        return  # a forked child, such as a loading worker, has its parent's sockets, but not the threads
    # This comes before the connections end: a rank that notices the end looks for the reason in the store.
    resources.roll_call.close()
    is_exit = not main_thread().is_alive()
    if is_exit:
        # The process exits anyway. A thread left in gloo while the interpreter exits would abort it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError):  # it ended with the default group
        dist.destroy_process_group(resources.groups[0])
    if resources.num_pending and not is_exit:
        # If this rank failed between the two halves of a message, the others may still send their parts.
        Thread(target=_release, args=(resources,), daemon=True).start()
    else:
        _release(resources, _AT_EXIT_SECONDS if resources.num_pending else _PATIENCE_SECONDS)
    # NCCL ends a group only together with all ranks, and other ranks may have failed.
    if is_exit and resources.owns_default_group and dist.is_initialized() and dist.get_backend() == "gloo":
        end_default_group()


def _release(resources: _GroupResources, patience_seconds: float = _PATIENCE_SECONDS) -> None:
    for messenger in resources.messengers:
        messenger.end(patience_seconds)
    resources.messengers.clear()
    resources.groups.clear()
