"""Worker processes that prefetch units deliver the same data as loading without workers."""

import functools
import gc
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import anybatch.data as ab
from anybatch.core.batch import Placement
from anybatch.core.splitting import SplitOptions
from anybatch.data.loading import UnitKey
from anybatch.data.prefetch import Prefetcher
from anybatch.errors import DataError

PAIRS = Placement(SplitOptions(micro_batch_size=2), 1, 0)
THREES = Placement(SplitOptions(micro_batch_size=3), 1, 0)
SECOND_OF_TWO = Placement(SplitOptions(micro_batch_size=2, lockstep=True), 2, 1)


class Drawing:
    """Samples that are their id, a draw from each global generator, and the id of the loading process."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()
        return {"id": index, "draws": torch.tensor(draws), "process": os.getpid()}


def made(num_workers: int, **more: Any) -> ab.Batches:
    """Return batches over three epochs."""
    return ab.batches(Drawing(), effective_batch_size=5, epochs=3, num_workers=num_workers, **more)


def content(units: Iterable[Any]) -> list[list[Any]]:
    """Return the ids and draws of each unit."""
    return [[unit["id"].tolist(), unit["draws"].tolist()] for unit in units]


def global_states() -> tuple[Any, ...]:
    """Return the states of the global generators of Python, numpy and torch."""
    words = np.random.get_state(legacy=False)["state"]
    return random.getstate(), words["key"].tolist(), words["pos"], torch.get_rng_state().tolist()


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@pytest.fixture
def workers() -> Callable[[], set[int]]:
    """Return a function that returns the live child processes started since the beginning of the test."""
    before = _children()
    return lambda: _children() - before


@pytest.fixture
def without_cycle_collection() -> Iterator[None]:
    """Disable garbage collection during a test, so that reference cycles stay alive."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.slow
def test_workers_change_nothing(num_workers: int, workers: Callable[[], set[int]]) -> None:
    """With workers, every rank gets the same samples and draws, and the caller's random states are unchanged.

    The same workers serve all steps and epochs, and exit when the iterator is exhausted.
    """
    states = global_states()
    for placement in (PAIRS, SECOND_OF_TWO):
        processes: set[int] = set()
        for batch, plain in zip(made(num_workers), made(0), strict=True):
            units = list(placement.micro_batches(batch))
            processes |= {process for unit in units for process in unit["process"].tolist()}
            assert content(units) == content(placement.micro_batches(plain))
        assert len(processes) == num_workers
        assert os.getpid() not in processes
        assert not workers()
    assert states == global_states()


ODD: dict[str, Callable[[int], torch.Tensor]] = {
    "sparse": lambda size: torch.eye(size, 3).to_sparse(),
    "a leaf": lambda size: torch.ones(size, 2, requires_grad=True),
    "conjugated": lambda size: torch.full((size, 2), 1 + 2j).conj(),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", list(ODD))
def test_unusual_tensors_arrive(kind: str) -> None:
    """Tensors of any layout arrive with the same values from workers as without."""
    collate = ab.AnyRows(lambda samples: {"values": ODD[kind](len(samples)), "ids": torch.tensor(samples)})
    for number in (0, 1):
        batches = ab.batches(range(4), effective_batch_size=4, shuffle=False, collate=collate, num_workers=number)
        for unit in (unit for batch in batches for unit in PAIRS.micro_batches(batch)):
            found, wanted = unit["values"], ODD[kind](2)
            assert (type(found), found.layout, found.requires_grad) == (
                type(wanted),
                wanted.layout,
                wanted.requires_grad,
            )
            torch.testing.assert_close(found.to_dense().resolve_conj(), wanted.to_dense().resolve_conj())


@pytest.mark.slow
def test_any_use_of_batches_gives_the_right_data(workers: Callable[[], set[int]]) -> None:
    """Skipped batches, other placements, and partial, repeated or interleaved feeds never give a wrong unit.

    The same worker processes serve all of them.
    """
    plain = list(made(0))
    run = iter(made(2))
    batches = [next(run) for _ in range(len(plain))]
    expected = {
        (number, placement): content(placement.micro_batches(batch))
        for number, batch in enumerate(plain)
        for placement in (PAIRS, THREES, SECOND_OF_TWO)
    }

    def fed(number: int, placement: Placement) -> bool:
        return content(placement.micro_batches(batches[number])) == expected[number, placement]

    assert fed(0, PAIRS)
    processes = workers()
    assert fed(2, PAIRS), "a batch was skipped"
    assert fed(3, THREES), "another placement"
    assert content(next(THREES.micro_batches(batches[4])) for _ in range(1)) == expected[4, THREES][:1]
    assert fed(5, THREES), "the feed before was left half-way"
    assert fed(5, THREES), "fed twice"
    assert fed(0, SECOND_OF_TWO), "back to the beginning"
    side_by_side = zip(PAIRS.micro_batches(batches[1]), PAIRS.micro_batches(batches[7]), strict=True)
    first, second = zip(*side_by_side, strict=True)
    assert content(first) == expected[1, PAIRS]
    assert content(second) == expected[7, PAIRS]
    assert workers() == processes
    assert next(run, None) is None
    assert not workers(), "exhausted"
    assert fed(8, PAIRS), "a batch that outlives its run is still right"


def test_workers_prefetch_the_following_batches(workers: Callable[[], set[int]]) -> None:
    """After the first unit, workers prefetch the next units and batches up to their limit.

    The data set counts its loads with a semaphore: waiting for samples that were never requested would time out.
    """
    loads = multiprocessing.Semaphore(0)

    class Counting(Drawing):
        def __getitem__(self, index: int) -> dict[str, Any]:
            loads.release()
            return super().__getitem__(index)

    batches = iter(ab.batches(Counting(), effective_batch_size=2, num_workers=1, drop_last=True, steps=100))
    first = next(batches)
    assert not workers(), "workers start with the first feed, when the cut is known"
    next(PAIRS.micro_batches(first))
    assert all(loads.acquire(timeout=60) for _ in range(6)), "one unit was taken, and two are kept under way"
    second = next(batches)
    list(PAIRS.micro_batches(second))
    assert all(loads.acquire(timeout=60) for _ in range(2))
    batches.close()
    assert not loads.acquire(block=False)
    assert not workers()


@pytest.mark.usefixtures("without_cycle_collection")
def test_dropping_the_iterator_ends_its_workers(workers: Callable[[], set[int]]) -> None:
    """Workers exit when the iterator or the feed is garbage-collected before it is exhausted."""
    run = iter(made(1))
    next(PAIRS.micro_batches(next(run)))
    assert workers()
    del run
    assert not workers()
    outlives = list(made(1)).pop()
    feed = PAIRS.micro_batches(outlives)
    next(feed)
    assert workers()
    del feed, outlives
    assert not workers()


@pytest.mark.usefixtures("without_cycle_collection")
def test_an_error_in_a_worker_is_the_users_own(workers: Callable[[], set[int]]) -> None:
    """An exception in a worker keeps its type and names the sample; later batches are still right."""

    class Broken(Drawing):
        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == 1:
                raise LookupError
            return super().__getitem__(index)

    run = iter(ab.batches(Broken(), effective_batch_size=4, shuffle=False, num_workers=2))
    first, second, third = next(run), next(run), next(run)
    with pytest.raises(LookupError, match="while loading sample 1 of Broken, epoch=0"):
        list(PAIRS.micro_batches(first))
    ids = [unit["id"].tolist() for batch in (second, third) for unit in PAIRS.micro_batches(batch)]
    assert ids == [[4, 5], [6, 7], [8, 9], [10]]
    run.close()
    assert not workers(), "the error does not keep the workers alive"


@pytest.fixture
def patience() -> Iterator[None]:
    """Raise in a test that waits longer than 20 seconds, for example for a batch that is never sent."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


class Fickle(Drawing):
    """Raises an exception for one sample, or returns a value with it, that cannot be pickled."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        sample["values"] = torch.zeros(8)
        sample["function"] = None
        if index == 1 and self.way == "raises":

            class LocalError(Exception):
                """A class that no other process can import."""

            message = "file 17 is damaged"
            raise LocalError(message)
        if index == 1:
            sample["function"] = lambda: None
        return sample


def as_lists(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack tensors and keep functions unchanged."""
    stacked = {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in ("id", "values")}
    return {**stacked, "functions": [one["function"] for one in samples]}


@pytest.mark.usefixtures("without_cycle_collection", "patience")
@pytest.mark.parametrize("way", ["raises", "returns"])
def test_values_that_cannot_be_pickled_are_named(way: str, workers: Callable[[], set[int]]) -> None:
    """An exception or a batch that cannot be pickled raises an error here; later batches are still right."""
    run = iter(ab.batches(Fickle(way), effective_batch_size=4, shuffle=False, num_workers=2, collate=as_lists))
    first, second = next(run), next(run)
    with pytest.raises(RuntimeError if way == "raises" else DataError) as caught:
        list(PAIRS.micro_batches(first))
    assert ("LocalError: file 17 is damaged" if way == "raises" else "num_workers=0") in str(caught.value)
    assert [unit["id"].tolist() for unit in PAIRS.micro_batches(second)] == [[4, 5], [6, 7]]
    run.close()
    del caught
    assert not workers()


def test_an_interrupted_wait_loses_nothing(workers: Callable[[], set[int]]) -> None:
    """After an interrupted wait for a unit, the next request returns the right unit."""
    ahead = Prefetcher(_epoch_of, num_workers=1, pin_memory=False)
    assert ahead.take(_key(1), functools.partial(_upwards, 1)) == 1
    waiting = ahead._items  # noqa: SLF001 (an interrupt cannot be timed from outside)
    ahead._items = _interrupted()  # noqa: SLF001
    with pytest.raises(KeyboardInterrupt):
        ahead.take(_key(2), functools.partial(_upwards, 2))
    ahead._items = waiting  # noqa: SLF001
    assert [ahead.take(_key(epoch), functools.partial(_upwards, epoch)) for epoch in (3, 4, 2)] == [3, 4, 2]
    del waiting
    ahead.close()
    assert not workers()


def _key(epoch: int) -> UnitKey:
    return UnitKey(epoch, (0,))


def _epoch_of(key: UnitKey) -> int:
    return key.epoch


def _upwards(first: int) -> Iterator[UnitKey]:
    return map(_key, range(first, 9))


def _interrupted() -> Iterator[Any]:
    raise KeyboardInterrupt
    yield
