"""Worker processes that run ahead of the step: the same data as without them, whatever the caller does."""

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
from anybatch.core.splitting import Cut
from anybatch.core.tree import tensors_of
from anybatch.data.prefetch import SMALL_BYTES, Prefetcher
from anybatch.errors import DataError
from tests.faults import sees

PAIRS = Placement(Cut(micro_batch_size=2), 1, 0)
THREES = Placement(Cut(micro_batch_size=3), 1, 0)
SECOND_OF_TWO = Placement(Cut(micro_batch_size=2, lockstep=True), 2, 1)


class Drawing:
    """Samples that hold their id, a draw from each global generator, and the process that loaded them."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()
        return {"id": index, "draws": torch.tensor(draws), "process": os.getpid()}


def made(num_workers: int, **more: Any) -> ab.Batches:
    """Return batches over three epochs."""
    return ab.batches(Drawing(), effective_batch_size=5, epochs=3, num_workers=num_workers, **more)


def content(units: Iterable[Any]) -> list[list[Any]]:
    """Return ids and draws of each unit."""
    return [[unit["id"].tolist(), unit["draws"].tolist()] for unit in units]


def global_states() -> tuple[Any, ...]:
    """Return the states of python's, numpy's and torch's generators."""
    words = np.random.get_state(legacy=False)["state"]
    return random.getstate(), words["key"].tolist(), words["pos"], torch.get_rng_state().tolist()


def _children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid is not None}


@pytest.fixture
def workers() -> Callable[[], set[int]]:
    """Return a function that returns the child processes that are alive and were not before the test."""
    before = _children()
    return lambda: _children() - before


@pytest.fixture
def without_cycle_collection() -> Iterator[None]:
    """Leave reference cycles alone during a test, so that what a cycle keeps alive shows every time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.slow
def test_workers_change_nothing(num_workers: int, workers: Callable[[], set[int]]) -> None:
    """With workers the same units hold the same samples and draws, on any rank; the caller's generators are left alone.

    The workers stay the same from step to step and epoch to epoch, and are gone when the iterator is exhausted.
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


class Kinds:
    """Samples with a tensor of each kind that travels, of which one has a given number of values."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        large = torch.arange(self._num_values, dtype=torch.float32) + index
        return {
            "large": large,
            "half": large[:3].to(torch.bfloat16),
            "flags": large[:3] > 1,
            "nothing": large[:0],
            "words": f"sample {index}",
            "inner": (torch.tensor(index), torch.rand(2)),
        }


@sees(
    "small units travel in shared memory",
    "src/anybatch/data/prefetch.py",
    "sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:",
    "sum(tensor.nbytes for tensor in tensors) < 0:",
)
@sees(
    "large units travel as bytes",
    "src/anybatch/data/prefetch.py",
    "sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:",
    "True:",
)
def test_units_travel_as_they_are_fastest_and_arrive_as_they_were() -> None:
    """Small ones as bytes, which hold no file open, and large ones in shared memory: types, shapes, values the same."""
    for num_values, is_shared in ((8, False), (SMALL_BYTES, True)):
        one, other = (
            [
                unit
                for batch in ab.batches(Kinds(num_values), effective_batch_size=4, num_workers=number)
                for unit in PAIRS.micro_batches(batch)
            ]
            for number in (0, 1)
        )
        for plain, sent in zip(one, other, strict=True):
            assert sent["words"] == plain["words"]
            for wanted, found in zip(tensors_of(plain), tensors_of(sent), strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert sent["large"].is_shared() == is_shared
            sent["large"].add_(1)  # what has arrived is the caller's, to write to as well


ODD: dict[str, Callable[[int], torch.Tensor]] = {
    "sparse": lambda size: torch.eye(size, 3).to_sparse(),
    "jagged": lambda size: torch.nested.nested_tensor([torch.ones(n + 1) for n in range(size)], layout=torch.jagged),
    "a leaf": lambda size: torch.ones(size, 2, requires_grad=True),
    "conjugated": lambda size: torch.full((size, 2), 1 + 2j).conj(),
    "transposed": lambda size: torch.arange(size * 3.0).reshape(3, size).t(),
    "expanded": lambda size: torch.ones(1, 3).expand(size, 3),
}


@sees(
    "loading: a sparse tensor is asked for its bytes",
    "src/anybatch/data/indexed.py",
    "tensor.numel() * tensor.itemsize for",
    "tensor.nbytes for",
    cases=["sparse"],
)
@sees(
    "what is more than its bytes travels as these",
    "src/anybatch/data/prefetch.py",
    "if tensors and all(map(is_plain, tensors)) and sum(",
    "if tensors and sum(",
    cases=["a leaf"],
)
@sees(
    "conjugated numbers are sent as they lie in memory",
    "src/anybatch/data/prefetch.py",
    "if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):",
    "if False:",
    cases=["conjugated"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", list(ODD))
def test_unusual_tensors_arrive(kind: str) -> None:
    """Of any layout, by any way of loading, with the same values; only what is no more than its bytes is sent so."""
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
            if kind == "jagged":
                found, wanted = found.values(), wanted.values()
            torch.testing.assert_close(found.to_dense().resolve_conj(), wanted.to_dense().resolve_conj())
            if number and kind == "a leaf":
                assert found.is_shared()


@sees(
    "workers go on where they are, whatever is asked for",
    "src/anybatch/data/prefetch.py",
    "if not self._keys.sent or self._keys.sent[0] != key:",
    "if not self._keys.sent:",
)
@pytest.mark.slow
def test_whatever_the_caller_does_the_data_is_right(workers: Callable[[], set[int]]) -> None:
    """Skipped batches, another placement, feeds left half-way, fed twice or side by side: never a wrong unit.

    All of it on the same worker processes, which start where they are needed.
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


def test_workers_run_ahead_into_the_following_batches(workers: Callable[[], set[int]]) -> None:
    """Once one unit was fed, workers load the next units and the next batches unasked, and no further than they should.

    The data set counts what it loads with a semaphore: waiting for samples that were never asked for would time out.
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
    """Workers end when the iterator is dropped half-way, and a feed that is no longer referenced."""
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
    """The exception type arrives, the message names the sample, and the batches after it are still right."""

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
    """Raise in a test that waits for more than 20 seconds, as one for a batch that is never sent does."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    former = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


class Fickle(Drawing):
    """Raises for one sample, or returns something with it, that no process can send."""

    def __init__(self, way: str, num_values: int = 8) -> None:
        super().__init__()
        self.way, self.num_values = way, num_values

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        sample["values"] = torch.zeros(self.num_values)
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
    """Stack tensors, and keep functions as they are."""
    stacked = {name: torch.stack([torch.as_tensor(one[name]) for one in samples]) for name in ("id", "values")}
    return {**stacked, "functions": [one["function"] for one in samples]}


@sees(
    "an error that cannot be pickled is sent",
    "src/anybatch/data/prefetch.py",
    "if _can_be_pickled(type(error)):",
    "if True:",
    cases=["raises-8"],
)
@sees(
    "a batch that cannot be pickled is sent",
    "src/anybatch/data/prefetch.py",
    """
            return self._packed()
        except Exception as error:""",
    """
            return LoadedUnit, (self.key_hash, self.value)
        except ArithmeticError as error:""",
    cases=["returns-8"],
)
@pytest.mark.usefixtures("without_cycle_collection", "patience")
@pytest.mark.parametrize("num_values", [8, SMALL_BYTES])
@pytest.mark.parametrize("way", ["raises", "returns"])
def test_what_cannot_be_pickled_is_named(way: str, num_values: int, workers: Callable[[], set[int]]) -> None:
    """An error or a batch that a worker cannot send is an error here, and the batches after it are still right."""
    data = Fickle(way, num_values)
    run = iter(ab.batches(data, effective_batch_size=4, shuffle=False, num_workers=2, collate=as_lists))
    first, second = next(run), next(run)
    with pytest.raises(RuntimeError if way == "raises" else DataError) as caught:
        list(PAIRS.micro_batches(first))
    assert ("LocalError: file 17 is damaged" if way == "raises" else "num_workers=0") in str(caught.value)
    assert [unit["id"].tolist() for unit in PAIRS.micro_batches(second)] == [[4, 5], [6, 7]]
    run.close()
    del caught
    assert not workers()


def test_an_interrupted_wait_loses_nothing(workers: Callable[[], set[int]]) -> None:
    """After an interrupt while waiting for a unit, the next one asked for is still the right one."""
    ahead: Prefetcher[int, int] = Prefetcher(_square, num_workers=1, pin_memory=False)
    assert ahead.take(1, functools.partial(_upwards, 1)) == 1
    waiting = ahead._items  # noqa: SLF001 (an interrupt cannot be timed from outside)
    ahead._items = _interrupted()  # noqa: SLF001
    with pytest.raises(KeyboardInterrupt):
        ahead.take(2, functools.partial(_upwards, 2))
    ahead._items = waiting  # noqa: SLF001
    assert [ahead.take(key, functools.partial(_upwards, key)) for key in (3, 4, 2)] == [9, 16, 4]
    del waiting
    ahead.close()
    assert not workers()


def _square(key: int) -> int:
    return key * key


def _upwards(first: int) -> Iterator[int]:
    return iter(range(first, 9))


def _interrupted() -> Iterator[Any]:
    raise KeyboardInterrupt
    yield
