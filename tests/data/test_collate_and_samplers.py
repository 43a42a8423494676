"""Collate functions that mix samples or change the number of rows, samplers, and data sets with batched reads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import anybatch.data as ab
from anybatch.core.batch import Placement, Position
from anybatch.core.splitting import SplitOptions
from anybatch.errors import DataError
from tests.raising import raises

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROWS = torch.arange(20.0, dtype=torch.float64).reshape(10, 2)


class Stream:
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(ROWS)


def normalised(samples: list[torch.Tensor]) -> torch.Tensor:
    """Collate, mix with a random weight, and subtract the mean of the batch."""
    batch = torch.stack(samples)
    mixed = batch + torch.rand((), dtype=torch.float64) * batch.flip(0)
    return mixed - mixed.mean(0)


def fed(batch: Any, cut: SplitOptions, world_size: int = 1) -> list[torch.Tensor]:
    """Return the units of all ranks."""
    return [unit for rank in range(world_size) for unit in Placement(cut, world_size, rank).micro_batches(batch)]


@pytest.mark.parametrize(
    ("is_stream", "num_workers"), [(False, 0), (True, 0), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_a_collate_over_the_effective_batch_sees_all_of_it(is_stream: bool, num_workers: int) -> None:
    """For every cut and number of ranks, the rows equal one collate call on the whole effective batch."""
    collate = ab.OverEffectiveBatch(normalised)
    data = Stream() if is_stream else ROWS
    for number in range(2):
        rows = []
        for size, world_size in ((None, 1), (2, 1), (1, 3)):
            batches = ab.batches(data, effective_batch_size=7, shuffle=False, collate=collate, num_workers=num_workers)
            made = [fed(batch, SplitOptions(micro_batch_size=size), world_size) for batch in batches]
            rows.append(torch.cat(made[number]))
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])
        assert rows[0].mean(0).abs().max() < 1e-12


@pytest.mark.parametrize("is_stream", [False, True])
def test_other_rows_than_samples_are_refused_unless_declared(is_stream: bool) -> None:
    """A collate function that filters samples is refused; declared as `AnyRows`, its rows are used unchanged."""

    def some(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([sample for sample in samples if sample[0] != 4.0])

    data = Stream() if is_stream else ROWS
    arguments: dict[str, Any] = {"effective_batch_size": 5, "shuffle": False}
    with raises(DataError, "other_rows"):
        fed(next(iter(ab.batches(data, collate=some, **arguments))), SplitOptions())
    declared = next(iter(ab.batches(data, collate=ab.AnyRows(some), **arguments)))
    assert [len(unit) for unit in fed(declared, SplitOptions())] == [4]


class Table:
    """Rows with a batched read, as in Hugging Face data sets; format "custom" means a transform."""

    def __init__(self, kind: str | None) -> None:
        self.format = {"type": kind}
        self.reads: list[str] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads.append("one")
        return ROWS[index]

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        self.reads.append("many")
        return [ROWS[index] for index in indices]


@pytest.mark.parametrize(("kind", "reads"), [("torch", ["many"] * 3), ("custom", ["one"] * 6)])
def test_data_without_random_draws_is_read_in_batches(kind: str, reads: list[str]) -> None:
    """Each unit of a table is one batched read; with a transform, samples are read singly under their random keys."""
    table = Table(kind)
    batch = next(iter(ab.batches(table, effective_batch_size=6, shuffle=False)))
    assert torch.equal(torch.cat(fed(batch, SplitOptions(micro_batch_size=2))), ROWS[:6])
    assert table.reads == reads


@pytest.mark.parametrize("kind", ["weighted", "subset"])
def test_a_sampler_sets_the_order(kind: str) -> None:
    """Indices of a sampler differ between epochs, and are the same on every rank and after a resume."""
    weights = torch.tensor([0.0, 1.0] * 5)
    sampler: Any = (
        WeightedRandomSampler(weights.tolist(), 8) if kind == "weighted" else SubsetRandomSampler([1, 3, 5, 7])
    )

    def make(start: Position | None = None) -> ab.Batches:
        return ab.batches(ROWS, effective_batch_size=3, epochs=3, sampler=sampler, seed=4, start=start)

    torch.manual_seed(1)
    ids = [batch.sample_ids for batch in make()]
    torch.manual_seed(2)
    again = [batch.sample_ids for batch in make()]
    resumed = [batch.sample_ids for batch in make(start=Position(1, 3))]
    steps = -(-len(sampler) // 3)
    assert ids == again
    assert resumed == ids[steps + 1 :]
    assert all(index % 2 for batch in ids for index in batch)
    assert ids[:steps] != ids[steps : 2 * steps]
    assert len(make()) == len(ids) == 3 * steps


@pytest.mark.parametrize(
    ("sampler", "more", "code"),
    [
        (RandomSampler(range(10)), {"shuffle": True}, "shuffle_and_sampler"),
        (BatchSampler(RandomSampler(range(10)), 2, drop_last=False), {}, "sampler_of_batches"),
        (DistributedSampler(range(10), num_replicas=2, rank=0), {}, "distributed_sampler"),  # type: ignore[arg-type]
        (RandomSampler(range(10), generator=torch.Generator()), {}, "own_generator"),
        (iter(range(10)), {}, "not_a_sampler"),
    ],
)
def test_samplers_that_are_refused(sampler: Any, more: dict[str, Any], code: str) -> None:
    """Samplers that would lose samples, or cannot be resumed, are refused with the fix."""
    with raises(DataError, code):
        ab.batches(ROWS, effective_batch_size=3, sampler=sampler, **more)


def test_a_sampler_of_batches_is_refused_when_it_is_drawn() -> None:
    """Samplers that yield lists are refused, and so is any sampler for a stream."""
    with raises(DataError, "sampler_of_batches"):
        list(ab.batches(ROWS, effective_batch_size=3, sampler=[[0, 1], [2, 3]]))
    with raises(DataError, "sampler_of_a_stream"):
        ab.batches(Stream(), effective_batch_size=3, sampler=range(3), shuffle=False)
