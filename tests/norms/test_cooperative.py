"""Cooperative tasks run one at a time, in order, and finish together."""

import threading
from collections.abc import Callable, Sequence

import pytest

from anybatch.errors import CompositionError
from anybatch.norms.exact import CooperativeThreads, Exchange
from tests.raising import raises

Task = Callable[[Exchange[int, int]], int]


def total(key: str, numbers: Sequence[int]) -> int:
    """Add the contributions."""
    del key
    return sum(numbers)


def test_tasks_take_turns_and_get_the_combined_value() -> None:
    """Tasks run one at a time, in order, between exchanges; each exchange gives all of them the same value."""
    trace: list[tuple[int, str]] = []
    inside = threading.Lock()

    def task(number: int) -> Task:
        def run(exchange: Exchange[int, int]) -> int:
            value = number
            for key in ("a", "b"):
                assert inside.acquire(blocking=False), "two ran at once"
                trace.append((number, key))
                inside.release()
                value = exchange(key, value)
            return value + number

        return run

    assert CooperativeThreads[int, int, int](total).run([task(number) for number in range(4)]) == [24, 25, 26, 27]
    assert trace == [(number, key) for key in ("a", "b") for number in range(4)]


@pytest.mark.parametrize("when", ["before", "between", "in the merge"])
def test_an_error_ends_all_tasks_and_is_raised(when: str) -> None:
    """An exception in one task is raised to the caller; the other tasks stop and run their clean-up."""
    cleaned: list[int] = []

    def merge(key: str, numbers: Sequence[int]) -> int:
        if when == "in the merge" and key == "b":
            raise ZeroDivisionError
        return sum(numbers)

    def task(number: int) -> Task:
        def run(exchange: Exchange[int, int]) -> int:
            try:
                if when == "before" and number == 2:
                    raise ZeroDivisionError
                exchange("a", number)
                if when == "between" and number == 1:
                    raise ZeroDivisionError
                try:
                    return exchange("b", number)
                except Exception:
                    if when != "in the merge":
                        cleaned.append(-1)
                    raise
            finally:
                cleaned.append(number)

        return run

    with pytest.raises(ZeroDivisionError):
        CooperativeThreads[int, int, int](merge).run([task(number) for number in range(4)])
    assert set(cleaned) == ({0, 1, 2} if when == "before" else {0, 1, 2, 3})


def test_tasks_at_different_exchanges_are_refused() -> None:
    """A different, missing or extra exchange is an error."""
    together: Task = lambda exchange: exchange("a", 1) + exchange("b", 1)  # noqa: E731 (three of a kind)
    stranger: Task = lambda exchange: exchange("a", 1) + exchange("c", 1)  # noqa: E731
    early: Task = lambda exchange: exchange("a", 1)  # noqa: E731
    for tasks in ([together, stranger], [together, early], [early, together]):
        with raises(CompositionError, "different-layers"):
            CooperativeThreads[int, int, int](total).run(tasks)
