"""Cooperative threads: tasks that run one at a time, and exchange values at points that all of them reach."""

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from anybatch.errors import CompositionError

C = TypeVar("C")  # a task's contribution to an exchange
V = TypeVar("V")  # the combined value for all tasks
R = TypeVar("R")  # a task's result
Exchange = Callable[[str, C], V]
"""Called by a task with the name of the exchange and its contribution; blocks until all tasks have called it, and
returns the combined value."""


class CooperativeThreads(Generic[C, V, R]):
    """Runs tasks in threads, exactly one at a time, and switches only when a task waits for the others.

    A task runs until it calls its exchange or returns; then the next task runs. Once all have contributed, their
    contributions are combined, and the tasks continue in the same order. So the order of execution is deterministic,
    and data shared by the tasks needs no lock.

    Threads, not generators: a task is a forward through the user's model, which has to be suspended inside nested
    calls.

    Args:
        combine: makes one value of the exchange's name and all contributions, in the order of the tasks.
        while_waiting: a context around each wait of a task, to save and restore state that other tasks change.
    """

    def __init__(
        self,
        combine: Callable[[str, Sequence[C]], V],
        while_waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._combine = combine
        self._while_waiting = while_waiting
        self._turns: list[threading.Semaphore] = []
        self._waiting: dict[int, tuple[str, C]] = {}
        self._finished: set[int] = set()
        self._num_exchanges = 0
        self._combined: Any = None
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None

    def run(self, tasks: Sequence[Callable[[Exchange[C, V]], R]]) -> list[R]:
        """Run all tasks to their end and return their results, in their order.

        Raises:
            CompositionError: tasks do not call the same exchanges in the same order.
            BaseException: the exception of a task; all other tasks have been cancelled.
        """
        self._turns = [threading.Semaphore(0) for _ in tasks]
        threads = [
            threading.Thread(
                # A thread starts with empty context variables, and the model may read the caller's.
                target=contextvars.copy_context().run,
                args=(self._serve, number, task),
                name=f"anybatch micro-batch {number}",
            )
            for number, task in enumerate(tasks)
        ]
        for thread in threads:
            thread.start()
        try:
            self._turns[0].release()
            for thread in threads:
                thread.join()
        except BaseException as error:  # a keyboard interrupt, say, while the threads run
            self._cancel(error)
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(tasks))]

    def _serve(self, number: int, task: Callable[[Exchange[C, V]], R]) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            return
        try:
            self._results[number] = task(lambda name, contribution: self._exchange(number, name, contribution))
            self._finished.add(number)
            self._pass_turn()
        # Another task has failed, and `run` raises its error.
        except _CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
            self._cancel(error)

    def _exchange(self, number: int, name: str, contribution: C) -> V:
        self._waiting[number] = (name, contribution)
        with self._while_waiting():
            self._pass_turn()
            self._turns[number].acquire()
        if self._error is not None:
            raise _CancelledError
        combined: V = self._combined
        return combined

    def _pass_turn(self) -> None:
        """Run the next task that has not contributed yet; after the last one combine, and start over."""
        remaining = [n for n in range(len(self._turns)) if n not in self._waiting and n not in self._finished]
        if remaining:
            self._turns[remaining[0]].release()
        elif self._waiting:
            self._check_same_exchange()
            self._num_exchanges += 1
            name = self._waiting[0][0]
            self._combined = self._combine(name, [self._waiting[n][1] for n in range(len(self._turns))])
            self._waiting.clear()
            self._turns[0].release()

    def _check_same_exchange(self) -> None:
        """Refuse tasks that have finished, or wait at another exchange, while the first one waits."""
        places = {
            number: repr(self._waiting[number][0]) if number in self._waiting else "its end"
            for number in range(len(self._turns))
        }
        first = next(iter(self._waiting))
        other = next((number for number, place in places.items() if place != places[first]), None)
        if other is None:
            return
        message = (
            f"micro-batches do not reach the same BatchNorm layers: after {self._num_exchanges} of them micro-batch "
            f"{first} is at {places[first]} and micro-batch {other} at {places[other]}. Exact normalisation needs the "
            "same layers in the same order for each micro-batch: make the model's path independent of the samples, or "
            "use norms=Ghost(group_size=...)."
        )
        raise CompositionError(message)

    def _cancel(self, error: BaseException) -> None:
        # Wake every thread, which sees the error and ends: none may be left waiting.
        self._error = self._error or error
        for turn in self._turns:
            turn.release()


class _CancelledError(BaseException):
    """Ends a task because another one has failed. Not an Exception, so that a model's `except Exception` misses it."""
