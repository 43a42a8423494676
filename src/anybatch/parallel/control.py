"""The control plane: a gloo group of all ranks for small messages, and its owner, which ends its threads and sockets.

A gloo group has two or three threads, which wake a hundred times a second, and a socket to every other rank. torch
keeps each group in a global table until `destroy_process_group`, so dropping the last reference does not end a group.

Every message is a gather, in about log2 N rounds of gloo's sends and receives; gloo's own collectives use a ring, with
about N rounds. After a timeout gloo breaks all connections of a group, so waits for sends and receives cannot be
interrupted and resumed. A thread waits for them instead, and forwards messages while this rank computes.
"""

import hmac
import os
import pickle
import secrets
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from anybatch.core.collectives import GatherRound, gather_rounds
from anybatch.core.torch_internals import outside_modes
from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.call_tracker import CallTracker, announce_end
from anybatch.parallel.launchers import Launch
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.torch_internals import PrefixStore, Store, default_store, set_timeout

_JOINED_KEY = "anybatch/times_joined"
_OPEN_KEY = "anybatch/open_worlds"
_WORLDS_KEY = "anybatch/num_worlds"
_SIGNATURES_KEY = "anybatch/signatures"
_NO_WAIT = timedelta(milliseconds=1)
_EXTRA_TIMEOUT = timedelta(seconds=10)
_EXIT_TIMEOUT_SECONDS, _TIMEOUT_SECONDS = 0.1, 2.0
_CONNECT_TIMEOUT = timedelta(seconds=45)
"""Timeout for connecting after the rendezvous: gloo does not notice a rank that has died since."""
_UNUSED_TAG = 0  # messages are numbered from 1
_NUM_NUMBERS, _NUM_SIZES = 2**19, 2**12
"""A tag has 31 bits, for the number and size of a message. gloo aborts the process if both ends differ in size."""
_ALGORITHM, _DIGEST_BYTES = "sha256", 32
_SIZE_BYTES, _FIRST_BYTES = 8, 1016
"""Bytes of the first message of a value: 8 for its size, and its first bytes, which are enough for most values."""


class Message:
    """A gather between all ranks: this rank's row of bytes, and after `wait` the equally long rows of other ranks."""

    def __init__(self, row: bytes, exchange: Callable[[bytearray], object], rank: int, num_ranks: int) -> None:
        self._rows = bytearray(row) + bytes(len(row) * (num_ranks - 1))
        self._exchange, self._rank, self._num_ranks = exchange, rank, num_ranks
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Send and receive, then wake all waiting callers."""
        try:
            self._exchange(self._rows)
        except BaseException as error:  # noqa: BLE001 (raised again in `wait`)
            self._error = error
        self._is_done.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has sent its row; raise a RuntimeError on a broken connection or a timeout."""
        if not self._is_done.wait(None if timeout is None else timeout.total_seconds()):
            message = f"not all ranks have sent their row of a message within {timeout}"
            raise RuntimeError(message)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether all rows have arrived, or the exchange has failed."""
        return self._is_done.is_set()

    @property
    def rows(self) -> list[bytes]:
        """The rows of all ranks, in rank order."""
        size = len(self._rows) // self._num_ranks
        # Rows are stored in rank order, starting with this rank.
        starts = [(rank - self._rank) % self._num_ranks * size for rank in range(self._num_ranks)]
        return [bytes(self._rows[start : start + size]) for start in starts]


class Messenger:
    """A thread that exchanges the messages of a gloo group; all ranks start the same messages in the same order.

    Call `end`, or the thread may abort the process at exit.
    """

    def __init__(self, group: "dist.ProcessGroup", rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout + _EXTRA_TIMEOUT  # callers give up earlier, with a reason
        self._rank, self._num_ranks = rank, num_ranks
        self._rounds = gather_rounds(rank, num_ranks)
        self._num_started = 0
        self._last: Message | None = None
        self._started: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_all, args=(self._started,), name="anybatch messages", daemon=True)
        self._thread.start()

    def start(self, row: bytes) -> Message:
        """Start a gather of this rank's row."""
        self._num_started += 1
        # Only messages of the same number and size are paired; others wait until `CallTracker` detects the desync.
        tag = (self._num_started % (_NUM_NUMBERS - 1) + 1) * _NUM_SIZES + len(row) % (_NUM_SIZES - 1)
        exchange = partial(_gather, self._group, self._rounds, tag, self._timeout)
        self._last = Message(row, exchange, self._rank, self._num_ranks)
        self._started.put(self._last)
        return self._last

    @property
    def is_waiting(self) -> bool:
        """Whether a message has not arrived yet."""
        return self._last is not None and not self._last.is_completed()

    def end(self, timeout_seconds: float) -> None:
        """End the thread after all started messages, if other ranks send their rows in time.

        After `timeout_seconds` this breaks the connections of the group, which ends all waits.
        """
        self._started.put(None)
        if self._thread is threading.current_thread():  # this thread garbage-collected the group, and ends next
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                # The only way to end gloo's pending receives: `abort` and `shutdown` of a group do not.
                next_rank = (self._rank + 1) % self._num_ranks
                self._group.recv([torch.zeros(1)], next_rank, _UNUSED_TAG).wait(_NO_WAIT)
            self._thread.join(_TIMEOUT_SECONDS)


def _run_all(started: "SimpleQueue[Message | None]") -> None:
    while (message := started.get()) is not None:
        message.run()
        del message  # releases the group


def _gather(
    group: "dist.ProcessGroup", rounds: tuple[GatherRound, ...], tag: int, timeout: timedelta, rows: bytearray
) -> None:
    """Fill in the rows of other ranks. Sent rows do not change any more, so the wait for sends comes last."""
    memory = torch.frombuffer(rows, dtype=torch.uint8)
    row_bytes = len(rows) // (1 + sum(step.num_rows for step in rounds))
    # Receives are posted in advance, so that senders need not ask first.
    receives = []
    for step in rounds:
        arriving = memory[step.first_row * row_bytes : (step.first_row + step.num_rows) * row_bytes]
        receives.append(group.recv([arriving], step.from_rank, tag))
    sends = []
    for step, received in zip(rounds, receives, strict=True):
        sends.append(group.send([memory[: step.num_rows * row_bytes]], step.to_rank, tag))
        received.wait(timeout)
    for sent in sends:
        sent.wait(timeout)


@dataclass(slots=True)
class _GroupResources:
    """The resources of a control group that must be released; forked children must not release them."""

    group: "dist.ProcessGroup | None"
    messenger: Messenger | None  # None on one rank
    call_tracker: CallTracker
    owns_default_group: bool
    process_id: int = field(default_factory=os.getpid)


class ControlGroup:
    """A gloo group of all ranks that ends when it is closed, garbage-collected, or at exit.

    Ending it does not wait for other ranks; data that was sent still arrives. With `owns_default_group`, the default
    group ends too, if this group is still open at the exit of the process.
    """

    def __init__(self, timeout: timedelta, *, owns_default_group: bool = False) -> None:
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        # Ranks make their worlds in the same order, so a world has the same name on all ranks.
        name = f"world_{store.add(f'{_WORLDS_KEY}/{rank}', 1)}"
        self.call_tracker = CallTracker(name, rank, size, timeout)
        # A barrier, because a rank that makes one more world than others would wait inside gloo, where it cannot check
        # on them.
        self.call_tracker.enter("World.from_environment (ab.Engine calls it)", None, barrier=True)
        try:
            self.call_tracker.wait_at_barrier()
        except WorldError as error:
            self.call_tracker.publish(RankFailure.of(error, rank, None))
            self.call_tracker.fail()
            raise
        finally:
            self.call_tracker.leave()
        connect_timeout = min(timeout, _CONNECT_TIMEOUT)
        with _connect_errors_explained(PrefixStore(name, store), rank, size, connect_timeout):
            group = dist.new_group(backend="gloo", timeout=connect_timeout)
            # A rank that ends its group before every rank has connected would make other ranks fail to connect.
            dist.all_reduce(torch.zeros(1), group=group)
            if rank == 0:
                store.set(f"{_SIGNATURES_KEY}/{name}", secrets.token_hex())
        self._secret = store.get(f"{_SIGNATURES_KEY}/{name}")
        messenger = Messenger(group, rank, size, timeout) if size > 1 else None
        self._resources = _GroupResources(group, messenger, self.call_tracker, owns_default_group)
        # Also at exit: threads of an open group may abort the process while the interpreter exits.
        self._finalizer = weakref.finalize(self, _destroy, self._resources)

    def start(self, row: bytes) -> Message:
        """Start gathering `row`, of one length on all ranks; raise a `WorldError` if the group has ended."""
        if self._resources.group is None:
            message = "this world is closed, and its ranks can no longer communicate. Create another one."
            raise WorldError(message)
        assert self._resources.messenger is not None, "one rank sends nothing"
        return self._resources.messenger.start(row)

    def finish(self, message: Message) -> list[bytes]:
        """Return all rows of a gather; raise a `WorldError` with the reason if a rank will not send its row."""
        self.call_tracker.wait(message, in_control_group=True)
        return message.rows

    def gather(self, row: bytes) -> list[bytes]:
        """Return the `row` of every rank, all of one length."""
        return self.finish(self.start(row))

    def _gather_bytes(self, content: bytes) -> list[bytes]:
        """Return the bytes that every rank passed; lengths may differ."""
        # Most values are small and fit in one message with their size; larger values need a second message.
        first, rest = content[:_FIRST_BYTES], content[_FIRST_BYTES:]
        rows = self.gather(len(content).to_bytes(_SIZE_BYTES) + first.ljust(_FIRST_BYTES, b"\0"))
        sizes = [int.from_bytes(row[:_SIZE_BYTES]) for row in rows]
        gathered = [row[_SIZE_BYTES:] for row in rows]
        if max(sizes) > _FIRST_BYTES:
            more = self.gather(rest.ljust(max(sizes) - _FIRST_BYTES, b"\0"))
            gathered = [row + others for row, others in zip(gathered, more, strict=True)]
        return [row[:size] for row, size in zip(gathered, sizes, strict=True)]

    def gather_objects(self, value: Any) -> list[Any]:  # noqa: ANN401 (small values of any type)
        """Return the values of every rank, pickled and signed on the way; torch's `all_gather_object` needs numpy."""
        rows = self._gather_bytes(signed(pickle.dumps(value), self._secret))
        return [pickle.loads(verified(row, self._secret)) for row in rows]  # noqa: S301 (signed by our own ranks)

    def close(self) -> bool:
        """End the group, and return whether it was open."""
        was_open = self._finalizer.alive
        self._finalizer()
        return was_open


def signed(content: bytes, secret: bytes) -> bytes:
    """Return the signature of `content`, then `content`: gloo has no authentication, and only ranks have the secret."""
    return hmac.digest(secret, content, _ALGORITHM) + content


def verified(content: bytes, secret: bytes) -> bytes:
    """Return the content passed to `signed`; raise a `WorldError` if the sender did not have the secret."""
    signature, inner = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, inner, _ALGORITHM)):
        message = (
            "a message between ranks has a wrong signature: another process has connected to this rank, or the "
            "connection is damaged. Let only hosts and users that you trust reach the ports of the ranks."
        )
        raise WorldError(message)
    return inner


def join_default_group(backend: str, launch: Launch, timeout: timedelta) -> None:
    """Initialise torch.distributed for the ranks that a launcher has started, also after a group was destroyed.

    A group leaves its addresses in the store, and torchrun keeps one store for the whole run: a second group under the
    same name would connect to the sockets of the first. So each join uses a new prefix in the store.
    """
    try:
        store, rank, size = _rendezvous(launch, timeout)
    except dist.DistNetworkError:
        # Without torchrun rank 0 hosts the store. A faster rank may have found the store of the previous group, which
        # rank 0 was about to end; the second attempt finds the new store.
        store, rank, size = _rendezvous(launch, timeout)
    connect_timeout = min(timeout, _CONNECT_TIMEOUT)
    with _connect_errors_explained(store, rank, size, connect_timeout):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=connect_timeout)
    set_timeout(timeout)
    # Marks the group as ours: `count_open_worlds` does not count in a group that the user started.
    default_store().set(f"{_OPEN_KEY}/{rank}", "0")


def count_open_worlds(change: int) -> int | None:
    """Add `change` to the number of open worlds of this rank, and return it; None if the user made the default group.

    The number is in the store of the default group, and so begins and ends with it. Worlds that are dropped without
    being closed stay in the count: garbage collection differs between ranks, but the count must not.
    """
    store = default_store()
    key = f"{_OPEN_KEY}/{dist.get_rank()}"
    return store.add(key, change) if store.check([key]) else None


def end_default_group() -> None:
    """Destroy all process groups of this process, and inform ranks that wait for this rank."""
    announce_end(dist.get_rank())
    _MESHES.clear()  # meshes would keep the group alive, with threads and sockets
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    # Gloo's destructor waits for the other ranks while a collective is pending, as after some errors.
    thread = threading.Thread(target=groups.clear, daemon=True)
    thread.start()
    thread.join(_TIMEOUT_SECONDS)


def _rendezvous(launch: Launch, timeout: timedelta) -> tuple[Store, int, int]:
    """Wait for all ranks, and return a part of the store that no earlier group has used, the rank and the size."""
    store, rank, size = next(rendezvous(launch.init_method, launch.rank, launch.size, timeout=timeout))
    store.set_timeout(timeout)
    # Each rank counts its own joins. All ranks join equally often, so they get the same number.
    number = store.add(f"{_JOINED_KEY}/{rank}", 1)
    join_store = PrefixStore(f"anybatch/join_{number}", store)
    join_store.set(f"rank_{rank}", "here")
    # Wait until all ranks have found this store: a rank may have found the store of the previous group instead.
    keys = [f"rank_{other}" for other in range(size)]
    try:
        join_store.wait(keys)
    except dist.DistStoreError as error:
        missing = [str(other) for other, key in enumerate(keys) if not join_store.check([key])]
        if not missing:
            raise
        message = (
            f"rank {', '.join(missing)} has not connected within {timeout.total_seconds():g} seconds, so the {size} "
            "ranks of this launch cannot start. Look for the reason in the output of that rank, if it has started."
        )
        raise WorldError(message) from error
    return join_store, rank, size


@contextmanager
def _connect_errors_explained(store: Store, rank: int, size: int, timeout: timedelta) -> Iterator[None]:
    """If the ranks fail to connect, raise a `RankFailedError` with the ranks that have ended."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        ended = _unresponsive_ranks(store, rank, size)
        who = f"rank {', '.join(map(str, ended))} has ended since" if ended else "no rank is known to have ended"
        message = (
            f"the {size} ranks found each other, but could not connect within {timeout.total_seconds():g} "
            f"seconds: {who}. Rank {rank} stops too: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        )
        raise RankFailedError(message, rank=ended[0] if ended else None) from error


def _unresponsive_ranks(store: Store, rank: int, size: int) -> list[int]:
    """Return the ranks that do not answer in the store; none if the store itself is gone."""
    keys = [f"lives_{other}" for other in range(size)]
    try:
        store.set(keys[rank], "1")
        with suppress(dist.DistStoreError):
            store.wait(keys, timedelta(seconds=_TIMEOUT_SECONDS))
        return [other for other, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return []


def _destroy(resources: _GroupResources) -> None:
    """Destroy the gloo group of a control group that was closed, garbage-collected, or is open at process exit."""
    if os.getpid() != resources.process_id:
        return  # a forked child, such as a loading worker, has its parent's sockets, but not the threads
    # Before the connections: a rank that notices a broken connection looks for the reason in the store.
    resources.call_tracker.close()
    is_exit = not threading.main_thread().is_alive()
    if is_exit:
        # The process exits anyway. A thread left in gloo while the interpreter exits would abort it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError):  # the group has ended with the default group
        dist.destroy_process_group(resources.group)
    resources.group = None
    is_waiting = resources.messenger is not None and resources.messenger.is_waiting
    if is_waiting and not is_exit:
        # If this rank failed between the start and the end of a message, other ranks may still send their rows.
        threading.Thread(target=_release, args=(resources, _TIMEOUT_SECONDS), daemon=True).start()
    else:
        _release(resources, _EXIT_TIMEOUT_SECONDS if is_waiting else _TIMEOUT_SECONDS)
    # NCCL ends a group only together with all ranks, and other ranks may have failed.
    if is_exit and resources.owns_default_group and dist.is_initialized() and dist.get_backend() == "gloo":
        end_default_group()


def _release(resources: _GroupResources, timeout_seconds: float) -> None:
    messenger, resources.messenger = resources.messenger, None  # its thread holds the group
    if messenger is not None:
        messenger.end(timeout_seconds)


# Meshes keep their default group alive, so `end_default_group` has to forget them.
_MESHES: Final[dict[tuple["dist.ProcessGroup", str, tuple[int, ...]], DeviceMesh]] = {}


def mesh_of_ranks(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape and device type ("cuda"), shared by all models while the ranks are connected.

    Torch caches data derived from meshes, so a new mesh for each model would look up groups that have ended.
    """
    group = dist.group.WORLD
    assert group is not None, "the ranks are connected"
    if any(known is not group for known, *_ in _MESHES):
        _MESHES.clear()  # a group that the user has destroyed
    if (group, kind, shape) not in _MESHES:
        # A plan calls this under fake tensors, but a mesh reads values of its tensors.
        with outside_modes():
            _MESHES[group, kind, shape] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _MESHES[group, kind, shape]
