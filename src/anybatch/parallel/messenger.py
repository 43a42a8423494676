"""Sums and gathers between all ranks in about log2 N messages: gloo's own go around a ring, in about N.

They are made of gloo's sends and receives. Waiting for one of these cannot be interrupted and taken up again, since
gloo breaks all connections of a group after a time-out. So a thread waits for them, which also passes messages on
while this rank computes; and whoever waits for the result waits for the thread.
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
_NOBODY_SENDS = 0  # a tag; messages are numbered from 1 on
_TAGS = 2**31


class Work(Protocol):
    """What is under way: a message of ours, or a collective of torch, which waits alike."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait; raises RuntimeError where it has failed, or has not come in time."""

    def is_completed(self) -> bool:
        """Whether it has come, or has failed."""


class Message:
    """A message between all ranks.

    Args:
        pass_on: sends and receives this rank's part of it.
    """

    def __init__(self, pass_on: Callable[[], object]) -> None:
        self._pass_on = pass_on
        self._is_over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Pass it on, and let those go on that wait for it."""
        try:
            self._pass_on()
        except BaseException as error:  # noqa: BLE001 (raised again by whoever waits for the message)
            self._error = error
        self._is_over.set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until every rank has brought its part.

        Args:
            timeout: how long to wait; None for as long as the thread does.

        Raises:
            RuntimeError: the connection to another rank broke, or the message has not come in time.
        """
        if not self._is_over.wait(None if timeout is None else timeout.total_seconds()):
            message = f"not all ranks have brought their part of a message within {timeout}"
            raise RuntimeError(message)
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether it has come, or has failed."""
        return self._is_over.is_set()


class Messenger:
    """A thread that passes the messages of a group on, in the order in which this rank starts them.

    All ranks start the same ones in the same order, as with collectives.

    Args:
        group: a gloo group, for these messages alone.
        rank: this rank in it.
        num_ranks: how many there are.
        timeout: how long a rank waits for another; whoever waits for a message gives up earlier, with a reason.
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
        # A thread that comes out of a wait while the interpreter ends would end the process with an abort.
        self._end = partial(_end, self._thread, self._started, group, (rank + 1) % num_ranks)
        self._end_at_exit = weakref.finalize(self, self._end, _AT_EXIT_SECONDS)

    def start_sum(self, numbers: torch.Tensor) -> Message:
        """Start replacing `numbers`, a contiguous CPU tensor, by their sum over ranks: the same bits on all of them."""
        group, rounds, tag, timeout = self._group, self._sum_rounds, self._next_tag(), self._timeout
        return self._start(lambda: _sum(group, rounds, numbers, tag, timeout))

    def start_gather(self, rows: bytearray) -> Message:
        """Start filling in rows of other ranks.

        Args:
            rows: equally long, one for each rank, in their order from this rank on: its own is there, and comes first.
        """
        group, rounds, tag, timeout = self._group, self._gather_rounds, self._next_tag(), self._timeout
        row_bytes = len(rows) // self._num_ranks
        return self._start(lambda: _gather(group, rounds, rows, row_bytes, tag, timeout))

    def end(self, patience_seconds: float) -> None:
        """End the thread. What has been started before is passed on, if other ranks bring their parts in time.

        Args:
            patience_seconds: after which the connections of the group are broken, so that nothing is waited for.
        """
        self._end_at_exit.detach()
        self._end(patience_seconds)

    def _start(self, pass_on: Callable[[], object]) -> Message:
        message = Message(pass_on)
        self._started.put(message)
        return message

    def _next_tag(self) -> int:
        self._num_started += 1
        return self._num_started % _TAGS or self._next_tag()


def _end(
    thread: threading.Thread,
    started: "SimpleQueue[Message | None]",
    group: "dist.ProcessGroup",
    other: int,
    patience_seconds: float,
) -> None:
    started.put(None)
    if thread is threading.current_thread():  # it has collected what referred to it, and ends by itself
        return
    thread.join(patience_seconds)
    if thread.is_alive():
        with suppress(RuntimeError):
            # Gloo frees waiting receives in no other way: `abort` and `shutdown` of a group leave them alone.
            group.recv([torch.zeros(1)], other, _NOBODY_SENDS).wait(_AT_ONCE)
        thread.join(_PATIENCE_SECONDS)


def _pass_on(started: "SimpleQueue[Message | None]") -> None:
    # Numbers may have been made in inference mode, and can be changed in that mode alone.
    with torch.inference_mode():
        while (message := started.get()) is not None:
            message.run()
            del message  # with its numbers, and the group


def _sum(
    group: "dist.ProcessGroup", rounds: tuple[SumRound, ...], numbers: torch.Tensor, tag: int, timeout: timedelta
) -> None:
    """Sum over ranks, in place. Receives are posted beforehand, so that whoever sends need not ask before."""
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


def _gather(  # noqa: PLR0917 (all that a thread is handed)
    group: "dist.ProcessGroup",
    rounds: tuple[GatherRound, ...],
    rows: bytearray,
    row_bytes: int,
    tag: int,
    timeout: timedelta,
) -> None:
    """Fill in the rows of other ranks. What is sent does not change any more, so that sends are waited for last."""
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
