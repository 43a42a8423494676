"""Functions that run in turns, one at a time, and wait for each other where they meet."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from anybatch.errors import CompositionError

C = TypeVar("C")
M = TypeVar("M")
R = TypeVar("R")
Meet = Callable[[str, C], M]
"""Called by a party: brings its contribution to the next meeting, waits for all others, gets what came of it."""


class Rendezvous(Generic[C, M, R]):
    """Runs parties in threads of their own, exactly one at a time: whoever has the baton runs.

    A party runs until it comes to a meeting or to its end, then the next one does. Once all have come, what they bring
    is merged, and they go on in the same order. So the order of everything is that of the parties, always.

    Args:
        merge: makes one value of all contributions, in the order of the parties; all parties get it.
        parked: a context around each wait, for what a party must find as it left it.
    """

    def __init__(
        self,
        merge: Callable[[str, Sequence[C]], M],
        parked: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._merge = merge
        self._parked = parked
        self._turns: list[threading.Semaphore] = []
        self._waiting: dict[int, tuple[str, C]] = {}
        self._ended: set[int] = set()
        self._num_meetings = 0
        self._merged: Any = None
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None

    def run(self, parties: Sequence[Callable[[Meet[C, M]], R]]) -> list[R]:
        """Run all parties to their end and return what they returned.

        Raises:
            CompositionError: parties do not come to the same meetings.
            BaseException: what a party raised; all others have been ended, in the middle of what they did.
        """
        self._turns = [threading.Semaphore(0) for _ in parties]
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._serve, number, party),
                name=f"anybatch micro-batch {number}",
            )
            for number, party in enumerate(parties)
        ]
        for thread in threads:
            thread.start()
        try:
            self._turns[0].release()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._abandon(error)
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(parties))]

    def _serve(self, number: int, party: Callable[[Meet[C, M]], R]) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            return
        try:
            self._results[number] = party(lambda key, contribution: self._meet(number, key, contribution))
            self._ended.add(number)
            self._go_on()
        except _AbandonedError:
            return
        except BaseException as error:  # noqa: BLE001 (raised again by the caller's thread)
            self._abandon(error)

    def _meet(self, number: int, key: str, contribution: C) -> M:
        self._waiting[number] = (key, contribution)
        with self._parked():
            self._go_on()
            self._turns[number].acquire()
        if self._error is not None:
            raise _AbandonedError
        merged: M = self._merged
        return merged

    def _go_on(self) -> None:
        """Hand the baton on: to whoever has not come yet, else, after the merge, to the first that waits."""
        coming = [n for n in range(len(self._turns)) if n not in self._waiting and n not in self._ended]
        if coming:
            self._turns[coming[0]].release()
        elif self._waiting:
            self._refuse_strangers()
            self._num_meetings += 1
            key = self._waiting[0][0]
            self._merged = self._merge(key, [self._waiting[n][1] for n in range(len(self._turns))])
            self._waiting.clear()
            self._turns[0].release()

    def _refuse_strangers(self) -> None:
        """Refuse parties that have ended, or come to another meeting, while the first one waits."""
        places = {
            number: repr(self._waiting[number][0]) if number in self._waiting else "its end"
            for number in range(len(self._turns))
        }
        first = next(iter(self._waiting))
        other = next((number for number, place in places.items() if place != places[first]), None)
        if other is None:
            return
        message = (
            f"micro-batches do not come to the same BatchNorm layers: after {self._num_meetings} of them micro-batch "
            f"{first} is at {places[first]} and micro-batch {other} at {places[other]}. Exact normalisation needs the "
            "same layers in the same order for each micro-batch: make the model's path independent of the samples, or "
            "use norms=Ghost(group_size=...)."
        )
        raise CompositionError(message)

    def _abandon(self, error: BaseException) -> None:
        self._error = self._error or error
        for turn in self._turns:
            turn.release()


class _AbandonedError(BaseException):
    """Another party has failed, so this one must end. Not an Exception: a model that catches those must end too."""
