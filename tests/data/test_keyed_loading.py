"""Every sample is loaded under its own random key, and the caller's generators are restored."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import anybatch as ab
from anybatch.core.batch import Placement
from anybatch.core.randomness import sample_seed
from anybatch.core.splitting import SplitOptions
from anybatch.data.random_state import HostDraws, host_random_state, seed_generators
from anybatch.errors import CheckpointError
from tests.raising import raises

NUM_SAMPLES = 40


class Drawing:
    """Samples of two draws from each global generator; the second normal number of a pair is cached."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> list[float]:
        normal = random.gauss(0.0, 1.0), float(np.random.randn())
        return [index, random.random(), float(np.random.rand()), float(torch.rand(())), *normal]


def seeded(dataset: Any, index: int) -> list[float]:
    """Return a sample read after seeding all generators."""
    seed_generators(sample_seed(0, 0, index))
    value: list[float] = dataset[index]
    return value


def fed(dataset: Any, **options: Any) -> list[list[float]]:
    """Return all samples from `ab.batches`, in units of 2."""
    values: list[list[float]] = []
    for batch in ab.batches(dataset, effective_batch_size=10, shuffle=False, collate=list, **options):
        for unit in Placement(SplitOptions(micro_batch_size=2), 1, 0).micro_batches(batch):
            values += unit
            random.random(), np.random.rand(), torch.rand(())  # the training loop may draw between units
    return values


@pytest.mark.parametrize("num_workers", [0, 1])
def test_draws_equal_seeding_everything(num_workers: int) -> None:
    """The draws of each sample equal the draws after seeding every generator with its key, also in a worker."""
    np.random.randn()  # numpy caches the second number of the pair
    assert fed(Drawing(), num_workers=num_workers) == [seeded(Drawing(), index) for index in range(NUM_SAMPLES)]


def test_a_custom_numpy_bit_generator() -> None:
    """A custom numpy bit generator is restored, and samples are still seeded."""
    former = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in the stubs
    try:
        np.random.set_bit_generator(np.random.MT19937(5))  # type: ignore[attr-defined]  # the same
        assert fed(Drawing()) == [seeded(Drawing(), index) for index in range(NUM_SAMPLES)]
    finally:
        np.random.set_bit_generator(former)  # type: ignore[attr-defined]  # the same


def test_tensors_are_read_in_one_batch() -> None:
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
