"""`batches` refuses invalid arguments with a message that gives the values and the fix."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import anybatch.data as ab
from anybatch.core.batch import Position
from anybatch.errors import BatchSizeError, DataError
from tests.raising import raises


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Three numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset):  # type: ignore[type-arg]
    """A data set without a length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_effective_batch_size(size: Any) -> None:
    """The effective batch size must be a whole number of at least 1."""
    with raises(BatchSizeError, "not_a_whole_number"):
        ab.batches(range(10), effective_batch_size=size)


@pytest.mark.parametrize(
    ("dataset", "arguments", "code"),
    [
        ([], {}, "empty"),
        (range(9), {"epochs": 1, "steps": 2}, "epochs_and_steps"),
        (range(9), {"epochs": 0}, "not_a_whole_number"),
        (range(9), {"steps": 0}, "not_a_whole_number"),
        (
            range(9),
            {"epochs": 3, "start": Position(3, 1)},
            "start_beyond_end",
        ),
        (range(9), {"start": Position(2)}, "start_beyond_end"),
        (range(9), {"start": Position(0, 10)}, "start_beyond_epoch"),
        (range(9), {"start": Position(0, -1)}, "not_a_whole_number"),
        (range(9), {"start": (0, 1)}, "not_a_position"),
        (
            range(3),
            {"drop_last": True},
            "no_full_batch",
        ),
        (range(9), {"num_workers": -1}, "not_a_whole_number"),
        (range(9), {"seed": 1.5}, "not_a_whole_number"),
        (range(9), {"collate": "stack"}, "not_a_function"),
        (5, {"shuffle": False}, "not_iterable"),
        ("train/", {"shuffle": False}, "not_iterable"),
        (Unsized(), {}, "no_length"),
        (DataLoader(Unsized(), sampler=range(9)), {}, "yields_batches"),
        (ab.batches(range(9), effective_batch_size=2), {}, "yields_batches"),
        ((i for i in range(9)), {"shuffle": False}, "read_only_once"),
        (Stream(), {"shuffle": True}, "shuffled_stream"),
        (
            Stream(),
            {"shuffle": False, "num_workers": 2},
            "too_many_workers",
        ),
        (ab.Shards([[1], [2]]), {"shuffle": False, "num_workers": 3}, "too_many_workers"),
    ],
)
def test_data_and_arguments(dataset: Any, arguments: dict[str, Any], code: str) -> None:
    """Invalid data sets and arguments are refused before anything is loaded."""
    with raises(DataError, code):
        ab.batches(dataset, **{"effective_batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("parts", "num_shards", "code"),
    [
        ([], None, "no_shards"),
        ([[1], (i for i in range(2))], None, "read_only_once"),
        (["a.txt", "b.txt"], None, "not_iterable"),
        (Stream(), None, "not_a_list_of_shards"),
        ([[1], [2]], 2, "num_shards"),
        (range, None, "num_shards"),
        (range, 0, "num_shards"),
    ],
)
def test_shards(parts: Any, num_shards: int | None, code: str) -> None:
    """Shards that cannot be counted or read again are refused."""
    with raises(DataError, code):
        ab.Shards(parts, num_shards=num_shards)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning is possible here")
def test_pinning_without_an_accelerator() -> None:
    """`pin_memory=True` without an accelerator is an error; None works on every machine."""
    with raises(DataError, "nothing_to_pin_for"):
        ab.batches(range(9), effective_batch_size=4, pin_memory=True)
