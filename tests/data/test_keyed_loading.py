"""Seeding only the generators that a data set uses gives the same numbers and restores the caller's state."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.randomness import sample_seed
from anybatch.core.splitting import Cut
from anybatch.data.random_state import HostDraws, PythonGenerator, host_random_state, seed_generators
from anybatch.errors import CheckpointError
from tests.raising import raises

NUM_SAMPLES = 40
DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "python, normal": lambda: random.gauss(0.0, 1.0),
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.randn()),
    "torch": lambda: float(torch.rand(())),
}


class Sometimes:
    """Draws a number for some samples only."""

    def __init__(self, draw: Callable[[], float], first: int) -> None:
        self._draw, self._first = draw, first

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> float:
        return self._draw() if index >= self._first and index % 3 == 0 else -1.0


def seeded(dataset: Any, index: int) -> float:
    """Return a sample read after seeding all generators."""
    seed_generators(sample_seed(0, 0, index))
    value: float = dataset[index]
    return value


def fed(dataset: Any, **options: Any) -> list[float]:
    """Return all samples from `ab.batches`, in units of 2."""
    values: list[float] = []
    for batch in ab.batches(dataset, effective_batch_size=10, shuffle=False, collate=list, **options):
        for unit in Placement(Cut(micro_batch_size=2), 1, 0).micro_batches(batch):
            values += unit
            random.random(), np.random.rand(), torch.rand(())  # the training loop may draw between units
    return values


@pytest.mark.parametrize("first", [0, 2, 31])
@pytest.mark.parametrize("draw", list(DRAWS))
@pytest.mark.parametrize("num_workers", [0, 1])
def test_numbers_are_those_of_seeding_everything(draw: str, first: int, num_workers: int) -> None:
    """Draws equal those after seeding every generator, also if the first draw is at sample 31 or in a worker."""
    dataset = Sometimes(DRAWS[draw], first)
    np.random.seed(3)
    np.random.randn()  # numpy caches the second number of the pair
    found = fed(dataset, num_workers=num_workers)

    assert found == [seeded(dataset, index) for index in range(NUM_SAMPLES)]


def seed_all() -> None:
    """Seed the three generators."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("draw", list(DRAWS))
def test_the_callers_generators_are_as_they_were(draw: str) -> None:
    """The caller's random states are restored, also if a generator is first used in the middle of a run."""
    for first in (0, 31):
        seed_all()
        expected = [random.random(), *np.random.randn(3).tolist(), float(torch.rand(()))]
        seed_all()
        pair = [float(np.random.randn())]  # numpy caches the second number of the pair
        for batch in ab.batches(Sometimes(DRAWS[draw], first), effective_batch_size=10, shuffle=False, collate=list):
            list(Placement(Cut(micro_batch_size=2), 1, 0).micro_batches(batch))

        assert [random.random(), *pair, *np.random.randn(2).tolist(), float(torch.rand(()))] == expected


@pytest.mark.parametrize(
    "draw", [random.random, lambda: random.gauss(0.0, 1.0), lambda: random.seed(5), lambda: random.randbytes(3)]
)
@pytest.mark.parametrize("reads", [True, False])
def test_pythons_generator_is_seen_where_it_lies(draw: Any, reads: bool) -> None:
    """The state that we read is Python's own; a draw changes it, and restoring it undoes the draw."""
    generator = PythonGenerator(reads=reads)
    random.seed(7)
    for _ in range(1_300):  # over the end of the words, twice
        before, state = generator.look(), random.getstate()
        assert generator.look() == before
        draw()
        assert generator.look() != before or random.getstate() == state
        drawn = random.getstate()
        generator.put_back(before)
        assert random.getstate() == state
        random.setstate(drawn)


def test_another_bit_generator_in_the_place_of_numpys() -> None:
    """A custom numpy bit generator is restored, and samples are still seeded."""
    former = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stubs  # type: ignore[attr-defined]  # missing in numpy's stubs
    try:
        np.random.set_bit_generator(np.random.MT19937(5))  # type: ignore[attr-defined]  # the same
        dataset = Sometimes(DRAWS["numpy"], 31)
        assert fed(dataset) == [seeded(dataset, index) for index in range(NUM_SAMPLES)]
    finally:
        np.random.set_bit_generator(former)  # type: ignore[attr-defined]  # the same


def test_tensors_are_read_at_once() -> None:
    """A `TensorDataset` gives the same batch as torch's own collation of its samples."""
    dataset = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    (batch,) = ab.batches(dataset, effective_batch_size=6, seed=3)
    (unit,) = batch.feed([range(6)])
    expected = torch.utils.data.default_collate([dataset[index] for index in batch.sample_ids])

    assert isinstance(unit, list)
    assert all(torch.equal(*pair) for pair in zip(unit, expected, strict=True))


@pytest.fixture
def another_numpy_generator() -> Iterator[None]:
    """Replace numpy's global generator by another kind."""
    former = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stubs
    np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(former)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("another_numpy_generator")
def test_numpys_global_generator_may_be_of_another_kind() -> None:
    """Draws from it are noticed and repeated; a checkpoint, which cannot hold its state, refuses it."""
    draws = HostDraws()
    assert draws.keep_if_drawn() is None
    first = np.random.rand()
    assert draws.keep_if_drawn() is draws
    draws.restore()
    assert np.random.rand() == first
    with raises(CheckpointError, "numpy_generator"):
        host_random_state()


def test_functions_of_random_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that replaces the functions of `random` after the import is seeded like any other."""
    own = random.Random(1)
    for name in ("seed", "getstate", "setstate", "random"):
        monkeypatch.setattr(random, name, getattr(own, name))
    generator = PythonGenerator()
    generator.seed(5)
    first = random.random()
    generator.seed(5)
    assert random.random() == first
