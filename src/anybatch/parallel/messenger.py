"""Sums and gathers between all ranks in about log2 N rounds; gloo's own collectives use a ring, in about N.

They use gloo's sends and receives. Waiting for these cannot be interrupted and resumed, since gloo breaks all
connections of a group after a timeout. So a thread waits for them, and forwards messages while this rank computes;
callers wait for the thread.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import torch

from anybatch.core.message_rounds import GatherRound, SumRound, gather_rounds, sum_rounds

if TYPE_CHECKING:
    import torch.distributed as dist

_AT_ONCE = timedelta(milliseconds=1)
_LATER = timedelta(seconds=10)
_AT_EXIT_SECONDS, _PATIENCE_SECONDS = 0.1, 2.0
_NOBODY_SENDS = 0  # an unused tag: messages are numbered from 1
_NUMBERS, _SIZES = 2**19, 2**12
"""Tags have 31 bits: the number of a message and its size. gloo aborts the process where sizes of a pair differ."""


class Work(Protocol):
    """Pending work: a message of ours, or a collective of torch, with the same `wait`."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait; raise a RuntimeError on failure or timeout."""

    def is_completed(self) -> bool:
        """Whether it has arrived or failed."""


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
        """Wait until every rank has sent its part, up to a timeout (None: the thread's).

        Raises a RuntimeError if the connection to another rank broke, or the timeout expired.
        """
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            message = f"not all ranks have sent their part of a message within {timeout}"
            raise RuntimeError(message)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has arrived or failed."""
        return self._is_over.is_set()


class Messenger:
    """A thread that processes the messages of a group in the order in which this rank starts them.

    All ranks start the same messages in the same order, like collectives.

    Args:
        group: a gloo group, only for these messages.
        rank: this rank in it.
        num_ranks: number of ranks.
        timeout: how long a rank waits for another; callers use a shorter timeout, with a reason.
    """

    def __init__(self, group: "dist.ProcessGroup", rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout + _LATER
        self._num_ranks = num_ranks
        self._sum_rounds = sum_rounds(rank, num_ranks)
        self._gather_rounds = gather_rounds(rank, num_ranks)
        self._num_started = 0
        self._started: SimpleQueue[Message | None] = SimpleQueue()
        self._thread = threading.Thread(target=_pass_on, args=(self._started,), name="anybatch messages", daemon=True)
        self._thread.start()
        # A thread that returns from a wait while the interpreter exits would abort the process.
        self._end = partial(_end, self._thread, self._started, group, (rank + 1) % num_ranks)
        self._end_at_exit = weakref.finalize(self, self._end, _AT_EXIT_SECONDS)

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
        self._end_at_exit.detach()
        self._end(patience_seconds)

    def _start(self, pass_on: Callable[[], object]) -> Message:
        message = Message(pass_on)
        self._started.put(message)
        return message

    def _next_tag(self, size: int) -> int:
        """Return a tag that only messages of the same number and size have; others wait until `RollCall` finds out."""
        self._num_started += 1
        return (self._num_started % (_NUMBERS - 1) + 1) * _SIZES + size % (_SIZES - 1)


def _end(
    thread: threading.Thread,
    started: "SimpleQueue[Message | None]",
    group: "dist.ProcessGroup",
    other: int,
    patience_seconds: float,
) -> None:
    started.put(None)
    if thread is threading.current_thread():  # this thread has garbage-collected the messenger, and ends next
        return
    thread.join(patience_seconds)
    if thread.is_alive():
        with suppress(RuntimeError):
            # The only way to end gloo's pending receives: `abort` and `shutdown` of a group do not.
            group.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(_AT_ONCE)
        thread.join(_PATIENCE_SECONDS)


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
