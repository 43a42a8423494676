"""Parties run one at a time, in order, and all end together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from anybatch.errors import CompositionError
from anybatch.norms.cooperative import Meet, Rendezvous
from tests.faults import sees

Party = Callable[[Meet[int, int]], int]


def total(key: str, numbers: Sequence[int]) -> int:
    """Merge by adding."""
    del key
    return sum(numbers)


def test_parties_take_turns_and_get_what_all_brought() -> None:
    """Between meetings parties run in order, one at a time; each meeting gives all of them the same."""
    trace: list[tuple[int, str]] = []
    inside = threading.Lock()

    def party(number: int) -> Party:
        def run(meet: Meet[int, int]) -> int:
            value = number
            for key in ("a", "b"):
                assert inside.acquire(blocking=False), "two ran at once"
                trace.append((number, key))
                inside.release()
                value = meet(key, value)
            return value + number

        return run

    assert Rendezvous[int, int, int](total).run([party(number) for number in range(4)]) == [24, 25, 26, 27]
    assert trace == [(number, key) for key in ("a", "b") for number in range(4)]


def test_one_party_meets_itself() -> None:
    """A single party gets its own contribution, and a party may meet nobody at all."""
    assert Rendezvous[int, int, int](total).run([lambda meet: meet("a", 5)]) == [5]
    assert Rendezvous[int, int, int](total).run([lambda _: 1, lambda _: 2]) == [1, 2]


@pytest.mark.parametrize("when", ["before", "between", "in the merge"])
def test_an_error_ends_all_parties_and_is_raised(when: str) -> None:
    """Whatever one party raises is raised to the caller; the others end where they are, and their clean-up runs."""
    cleaned: list[int] = []

    def merge(key: str, numbers: Sequence[int]) -> int:
        if when == "in the merge" and key == "b":
            raise ZeroDivisionError
        return sum(numbers)

    def party(number: int) -> Party:
        def run(meet: Meet[int, int]) -> int:
            try:
                if when == "before" and number == 2:
                    raise ZeroDivisionError
                meet("a", number)
                if when == "between" and number == 1:
                    raise ZeroDivisionError
                try:
                    return meet("b", number)
                except Exception:
                    if when != "in the merge":
                        cleaned.append(-1)
                    raise
            finally:
                cleaned.append(number)

        return run

    with pytest.raises(ZeroDivisionError):
        Rendezvous[int, int, int](merge).run([party(number) for number in range(4)])
    assert set(cleaned) == ({0, 1, 2} if when == "before" else {0, 1, 2, 3})


@sees(
    "norms: micro-batches that meet at different layers are merged",
    "src/anybatch/norms/cooperative.py",
    """
            self._refuse_strangers()
""",
    "",
)
def test_parties_that_miss_each_other_are_refused() -> None:
    """Another meeting, one less and one more are errors that say who is where."""
    together: Party = lambda meet: meet("a", 1) + meet("b", 1)  # noqa: E731 (three of a kind)
    stranger: Party = lambda meet: meet("a", 1) + meet("c", 1)  # noqa: E731
    early: Party = lambda meet: meet("a", 1)  # noqa: E731
    for parties, said in (
        ([together, stranger], "after 1 of them micro-batch 0 is at 'b' and micro-batch 1 at 'c'"),
        ([together, early], "micro-batch 0 is at 'b' and micro-batch 1 at its end"),
        ([early, together], "micro-batch 1 is at 'b' and micro-batch 0 at its end"),
    ):
        with pytest.raises(CompositionError, match=said):
            Rendezvous[int, int, int](total).run(parties)


@sees(
    "norms: random numbers run on while a micro-batch waits",
    "src/anybatch/norms/cooperative.py",
    """
        with self._parked():
""",
    """
        if True:
""",
    also=["tests/engine/test_batch_norm.py::test_random_numbers_belong_to_micro_batches"],
)
def test_parking_surrounds_every_wait() -> None:
    """What a party must find again is put away before others run, and put back after."""
    current = [0]

    @contextmanager
    def parked() -> Iterator[None]:
        kept = current[0]
        yield
        current[0] = kept

    def party(number: int) -> Party:
        def run(meet: Meet[int, int]) -> int:
            current[0] = number
            meet("a", 0)
            assert current[0] == number
            meet("b", 0)
            return current[0]

        return run

    assert Rendezvous[int, int, int](total, parked).run([party(number) for number in range(3)]) == [0, 1, 2]
