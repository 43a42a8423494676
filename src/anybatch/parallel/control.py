"""The control plane: a group of all ranks for small messages, with an owner that ends it without leftovers.

A gloo group has two or three threads, which wake a hundred times a second, and a socket to every other rank. torch
keeps each group in a global table until `destroy_process_group`, so a group that is only dropped stays.

Messages take about log2 N rounds of gloo's sends and receives; gloo's own collectives use a ring, in about N. Waiting
for a send or receive cannot be interrupted and resumed, since gloo breaks all connections of a group after a timeout.
So a thread waits for them, and forwards messages while this rank computes; callers wait for the thread.
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
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from anybatch.core.collectives import GatherRound, SumRound, gather_rounds, sum_rounds
from anybatch.core.torch_internals import outside_modes
from anybatch.errors import RankFailedError, WorldError
from anybatch.parallel.launchers import Launch
from anybatch.parallel.rank_failure import RankFailure
from anybatch.parallel.roll_call import RollCall, announce_end
from anybatch.parallel.torch_internals import PrefixStore, Store, default_store, set_timeout

_JOINED_KEY = "anybatch/times_joined"
_OPEN_KEY = "anybatch/open_worlds"
_WORLDS_KEY = "anybatch/num_worlds"
_SIGNATURES_KEY = "anybatch/signatures"
_AT_ONCE = timedelta(milliseconds=1)
_LATER = timedelta(seconds=10)
_AT_EXIT_SECONDS, _PATIENCE_SECONDS = 0.1, 2.0
_CONNECTING = timedelta(seconds=45)
"""Timeout for connecting after the rendezvous: gloo does not notice a rank that has died meanwhile."""
_NOBODY_SENDS = 0  # an unused tag: messages are numbered from 1
_NUMBERS, _SIZES = 2**19, 2**12
"""Tags have 31 bits: the number of a message and its size. gloo aborts the process where sizes of a pair differ."""
_ALGORITHM, _DIGEST_BYTES = "sha256", 32
_SIZE_BYTES, _FIRST_BYTES = 8, 1016
"""The first message of a value: its size, and its first bytes, which are enough for most values."""


class Message:
    """A message between all ranks; `pass_on` sends and receives this rank's part."""

    def __init__(self, pass_on: Callable[[], object]) -> None:
        self._pass_on = pass_on
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Send and receive, then wake all waiting callers."""
        try:
            self._pass_on()
        except BaseException as error:  # noqa: BLE001 (raised again in `wait`)
            self._error = error
        self._is_over.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has sent its part; a RuntimeError if a connection broke or the timeout expired."""
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            message = f"not all ranks have sent their part of a message within {timeout}"
            raise RuntimeError(message)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has arrived or failed."""
        return self._is_over.is_set()


class Messenger:
    """A thread that processes the messages of a gloo group, used only for these, in the order of their start.

    All ranks start the same messages in the same order, like collectives. `timeout` is how long a rank waits for
    another; callers use a shorter one, with a reason. `end` it, or the thread may abort the process at exit.
    """

    def __init__(self, group: "dist.ProcessGroup", rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout + _LATER
        self._num_ranks = num_ranks
        self._next_rank = (rank + 1) % num_ranks
        self._sum_rounds = sum_rounds(rank, num_ranks)
        self._gather_rounds = gather_rounds(rank, num_ranks)
        self._num_started = 0
        self._started: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=_pass_on, args=(self._started,), name="anybatch messages", daemon=True)
        self._thread.start()

    def start_sum(self, numbers: torch.Tensor) -> Message:
        """Start replacing `numbers`, a contiguous CPU tensor, by their sum over ranks, bitwise the same on all."""
        group, rounds, tag, timeout = self._group, self._sum_rounds, self._next_tag(2 * numbers.nbytes), self._timeout
        return self._start(lambda: _sum(group, rounds, numbers, tag, timeout))

    def start_gather(self, rows: bytearray) -> Message:
        """Start filling in rows of other ranks.

        `rows` are equally long, one for each rank, ordered from this rank on: its own comes first and is already
        filled.
        """
        group, rounds, tag, timeout = self._group, self._gather_rounds, self._next_tag(2 * len(rows) + 1), self._timeout
        row_bytes = len(rows) // self._num_ranks
        return self._start(lambda: _gather(group, rounds, rows, row_bytes, tag, timeout))

    def end(self, patience_seconds: float) -> None:
        """End the thread after the messages started before, if other ranks send their parts in time.

        After `patience_seconds` it breaks the connections of the group, which ends all waits.
        """
        self._started.put(None)
        if self._thread is threading.current_thread():  # it has garbage-collected the group, and ends next
            return
        self._thread.join(patience_seconds)
        if self._thread.is_alive():
            with suppress(RuntimeError):
                # The only way to end gloo's pending receives: `abort` and `shutdown` of a group do not.
                self._group.recv([torch.zeros(1)], self._next_rank, _NOBODY_SENDS).wait(_AT_ONCE)
            self._thread.join(_PATIENCE_SECONDS)

    def _start(self, pass_on: Callable[[], object]) -> Message:
        message = Message(pass_on)
        self._started.put(message)
        return message

    def _next_tag(self, size: int) -> int:
        """Return a tag that only messages of the same number and size have; others wait until `RollCall` finds out."""
        self._num_started += 1
        return (self._num_started % (_NUMBERS - 1) + 1) * _SIZES + size % (_SIZES - 1)


def _pass_on(started: "SimpleQueue[Message | None]") -> None:
    # Tensors made in inference mode can only be changed in that mode.
    with torch.inference_mode():
        while (message := started.get()) is not None:
            message.run()
            del message  # releases its numbers, and the group


def _sum(
    group: "dist.ProcessGroup", rounds: tuple[SumRound, ...], numbers: torch.Tensor, tag: int, timeout: timedelta
) -> None:
    """Sum over ranks, in place. Receives are posted in advance, so that senders need not ask first."""
    arriving = [numbers if one.receives == "sum" else torch.empty_like(numbers) for one in rounds]
    receives = [
        None if one.receives == "nothing" else group.recv([part], one.partner, tag)
        for one, part in zip(rounds, arriving, strict=True)
    ]
    for one, part, received in zip(rounds, arriving, receives, strict=True):
        sent = group.send([numbers], one.partner, tag) if one.sends else None
        if received is not None:
            received.wait(timeout)
        if sent is not None:  # before the numbers change
            sent.wait(timeout)
        if one.receives == "part":
            numbers.add_(part)


def _gather(  # noqa: PLR0917 (the thread's arguments)
    group: "dist.ProcessGroup",
    rounds: tuple[GatherRound, ...],
    rows: bytearray,
    row_bytes: int,
    tag: int,
    timeout: timedelta,
) -> None:
    """Fill in the rows of other ranks. Sent rows do not change any more, so the wait for sends comes last."""
    memory = torch.frombuffer(rows, dtype=torch.uint8)
    receives = []
    for one in rounds:
        arriving = memory[one.first_row * row_bytes : (one.first_row + one.num_rows) * row_bytes]
        receives.append(group.recv([arriving], one.from_rank, tag))
    sends = []
    for one, received in zip(rounds, receives, strict=True):
        sends.append(group.send([memory[: one.num_rows * row_bytes]], one.to_rank, tag))
        received.wait(timeout)
    for sent in sends:
        sent.wait(timeout)


@dataclass(slots=True)
class _GroupResources:
    """The resources of a control group that must be released; forked children must not release them."""

    group: "dist.ProcessGroup | None"
    messenger: Messenger | None  # None on one rank
    roll_call: RollCall
    owns_default_group: bool
    num_pending: int = 0
    process_id: int = field(default_factory=os.getpid)


class PendingMessage:
    """A started message between all ranks that must be waited for."""

    def __init__(self, work: Message, resources: _GroupResources) -> None:
        self._work = work
        self._resources = resources
        resources.num_pending += 1

    def wait(self) -> None:
        """Wait until every rank has sent its part; raise the reason if one has ended or will not send it."""
        try:
            self._resources.roll_call.wait(self._work, in_control_group=True)
        finally:
            # If this rank has stopped waiting, the message is still pending.
            if self._work.is_completed():
                self._resources.num_pending -= 1


class ControlGroup:
    """A gloo group of all ranks that ends when it is closed, garbage-collected, or at exit.

    Ending it is local: it does not wait for other ranks. Sent data still arrives, and every message needs all ranks, so
    a rank that ends the group earlier does not affect the others.

    `timeout` is how long a rank waits for the others. With `owns_default_group`, the default group ends too, if this
    one is still open at the exit of the process. `roll_call` tracks the ranks' positions in the sequence of calls.
    """

    def __init__(self, timeout: timedelta, *, owns_default_group: bool = False) -> None:
        rank, size, store = dist.get_rank(), dist.get_world_size(), default_store()
        # Ranks make their worlds in the same order, so the name is the same on all of them.
        name = f"world_{store.add(f'{_WORLDS_KEY}/{rank}', 1)}"
        self.roll_call = RollCall(name, rank, size, timeout)
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
        with _connecting(PrefixStore(name, store), rank, size, connecting):
            group = dist.new_group(backend="gloo", timeout=connecting)
            # A rank that ends its group before every rank has connected would make the others fail to connect.
            dist.all_reduce(torch.zeros(1), group=group)
            if rank == 0:
                store.set(f"{_SIGNATURES_KEY}/{name}", secrets.token_hex())
        self._secret = store.get(f"{_SIGNATURES_KEY}/{name}")
        self._rank, self._size = rank, size
        messenger = Messenger(group, rank, size, timeout) if size > 1 else None
        self._resources = _GroupResources(group, messenger, self.roll_call, owns_default_group)
        # Also at exit: threads of an open group may abort the process while the interpreter exits.
        self._finalizer = weakref.finalize(self, _destroy, self._resources)

    def refuse_if_closed(self) -> None:
        """Raise a `WorldError` if the group has ended."""
        if self._resources.group is None:
            message = "this world is closed, and its ranks can no longer communicate. Create another one."
            raise WorldError(message)

    def start_sum(self, numbers: torch.Tensor) -> PendingMessage:
        """Start replacing `numbers`, a contiguous CPU tensor, by their sum over ranks, bitwise the same on all."""
        return PendingMessage(self._messenger.start_sum(numbers), self._resources)

    def gather(self, mine: bytes) -> list[bytearray]:
        """Return the bytes that every rank passed as `mine`, all of one length."""
        rows = bytearray(mine) + bytes(len(mine) * (self._size - 1))
        PendingMessage(self._messenger.start_gather(rows), self._resources).wait()
        # They arrive in rank order, starting after this rank.
        places = [(rank - self._rank) % self._size * len(mine) for rank in range(self._size)]
        return [rows[place : place + len(mine)] for place in places]

    def gather_bytes(self, written: bytes) -> list[bytes]:
        """Return the bytes that every rank passed; lengths may differ."""
        # Most values are small and fit in one message with their size; larger ones need another.
        first, rest = written[:_FIRST_BYTES], written[_FIRST_BYTES:]
        begun = self.gather(len(written).to_bytes(_SIZE_BYTES) + first.ljust(_FIRST_BYTES, b"\0"))
        sizes = [int.from_bytes(row[:_SIZE_BYTES]) for row in begun]
        gathered = [row[_SIZE_BYTES:] for row in begun]
        if max(sizes) > _FIRST_BYTES:
            more = self.gather(rest.ljust(max(sizes) - _FIRST_BYTES, b"\0"))
            gathered = [row + others for row, others in zip(gathered, more, strict=True)]
        return [bytes(row[:size]) for row, size in zip(gathered, sizes, strict=True)]

    def write(self, value: Any) -> bytes:  # noqa: ANN401 (small values of any type)
        """Return a value pickled and signed; torch's `all_gather_object` needs numpy."""
        return signed(pickle.dumps(value), self._secret)

    def read(self, written: bytes) -> Any:  # noqa: ANN401 (what was written)
        """Return a value that a rank has written."""
        return pickle.loads(unsigned(written, self._secret))  # noqa: S301 (signed by our own ranks)

    @property
    def _messenger(self) -> Messenger:
        self.refuse_if_closed()
        assert self._resources.messenger is not None, "one rank sends nothing"
        return self._resources.messenger

    def close(self) -> bool:
        """End the group, and return whether it was open."""
        was_open = self._finalizer.alive
        self._finalizer()
        return was_open


def signed(content: bytes, secret: bytes) -> bytes:
    """Return bytes after their signature; gloo has no authentication, and only the ranks share the secret."""
    return hmac.digest(secret, content, _ALGORITHM) + content


def unsigned(content: bytes, secret: bytes) -> bytes:
    """Return the content passed to `signed`; raise a `WorldError` for a sender without the secret."""
    signature, inner = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if not hmac.compare_digest(signature, hmac.digest(secret, inner, _ALGORITHM)):
        message = (
            "a message between ranks has a wrong signature: another process has connected to this rank, or the "
            "connection is damaged. Let only hosts and users that you trust reach the ports of the ranks."
        )
        raise WorldError(message)
    return inner


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
    _MESHES.clear()  # they would keep it alive, with threads and sockets
    groups = [dist.group.WORLD]
    dist.destroy_process_group()
    # Gloo's destructor waits for the other ranks while a collective is pending, as after some errors.
    thread = threading.Thread(target=groups.clear, daemon=True)
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
    is_exit = not threading.main_thread().is_alive()
    if is_exit:
        # The process exits anyway. A thread left in gloo while the interpreter exits would abort it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(ValueError):  # it ended with the default group
        dist.destroy_process_group(resources.group)
    resources.group = None
    if resources.num_pending and not is_exit:
        # If this rank failed between the two halves of a message, the others may still send their parts.
        threading.Thread(target=_release, args=(resources, _PATIENCE_SECONDS), daemon=True).start()
    else:
        _release(resources, _AT_EXIT_SECONDS if resources.num_pending else _PATIENCE_SECONDS)
    # NCCL ends a group only together with all ranks, and other ranks may have failed.
    if is_exit and resources.owns_default_group and dist.is_initialized() and dist.get_backend() == "gloo":
        end_default_group()


def _release(resources: _GroupResources, patience_seconds: float) -> None:
    messenger, resources.messenger = resources.messenger, None  # its thread holds the group
    if messenger is not None:
        messenger.end(patience_seconds)


# Meshes keep their default group alive, so `end_default_group` has to forget them.
_MESHES: Final[dict[tuple["dist.ProcessGroup", str, tuple[int, ...]], DeviceMesh]] = {}


def mesh_of_ranks(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape and device type ("cuda"), shared by all models while the ranks are connected.

    A mesh with several axes has its own process groups, which end with the default group: torch caches meshes and data
    derived from them, and would otherwise look up groups that have ended. Ranks along the last axis are consecutive.
    """
    group = dist.group.WORLD
    assert group is not None, "the ranks are connected"
    if any(known is not group for known, *_ in _MESHES):
        _MESHES.clear()  # a group that the user has destroyed
    if (group, kind, shape) not in _MESHES:
        # A plan calls this under fake tensors, but a mesh reads numbers from its tensors.
        with outside_modes():
            _MESHES[group, kind, shape] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return _MESHES[group, kind, shape]
