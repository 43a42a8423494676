"""`batches` refuses invalid arguments with a message that gives the values and the fix."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import anybatch.data as ab
from anybatch.core.batch import Position
from anybatch.errors import BatchSizeError, DataError


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Three numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Unsized(Dataset):  # type: ignore[type-arg]
    """A data set without a length."""

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "effective_batch_size=0 must be a whole number of at least 1"),
        (-1, "effective_batch_size=-1 must be a whole number of at least 1"),
        (2.5, "effective_batch_size=2.5 must be a whole number of at least 1, not float"),
        (True, "effective_batch_size=True must be a whole number of at least 1, not bool"),
    ],
)
def test_effective_batch_size(size: Any, message: str) -> None:
    """The effective batch size must be a whole number of at least 1."""
    with pytest.raises(BatchSizeError, match=message):
        ab.batches(range(10), effective_batch_size=size)


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        ([], {}, r"the data set is empty: len\(dataset\)=0"),
        (range(9), {"epochs": 1, "steps": 2}, "epochs=1 and steps=2 both set the end of the run. Give one"),
        (range(9), {"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
        (range(9), {"steps": 0}, "steps=0 must be a whole number of at least 1"),
        (
            range(9),
            {"epochs": 3, "start": Position(3, 1)},
            "beyond the end of the run: epochs=3 .* Give epochs=4 or more",
        ),
        (range(9), {"start": Position(2)}, "epochs=1, as neither epochs nor steps is given, .* Give epochs=3 or more"),
        (range(9), {"start": Position(0, 10)}, "start.sample_offset=10 is larger than an epoch of 9 samples"),
        (range(9), {"start": Position(0, -1)}, "start.sample_offset=-1 must be a whole number of at least 0"),
        (range(9), {"start": (0, 1)}, r"start=\(0, 1\) must be a Position"),
        (
            range(3),
            {"drop_last": True},
            "the data set has 3 samples, effective_batch_size=4 needs 4. Use drop_last=False",
        ),
        (range(9), {"num_workers": -1}, "num_workers=-1 must be a whole number of at least 0"),
        (range(9), {"seed": 1.5}, "seed=1.5 must be a whole number"),
        (range(9), {"collate": "stack"}, "collate='stack' must be a function"),
        (5, {"shuffle": False}, "dataset is of type int; its samples can be neither indexed nor iterated"),
        ("train/", {"shuffle": False}, "dataset is of type str; its samples can be neither"),
        (Unsized(), {}, r"dataset \(Unsized\) has __getitem__ but no __len__"),
        (DataLoader(Unsized(), sampler=range(9)), {}, "dataset is a DataLoader, which yields batches"),
        (ab.batches(range(9), effective_batch_size=2), {}, "dataset is a Batches, which yields batches"),
        ((i for i in range(9)), {"shuffle": False}, "dataset is a generator, which can be read only once"),
        (Stream(), {"shuffle": True}, "shuffle=True needs a data set with an index.* shuffle inside the data set"),
        (
            Stream(),
            {"shuffle": False, "num_workers": 2},
            "yield every sample 2 times. Use num_workers=1, or .* ab.Shards",
        ),
        (ab.Shards([[1], [2]]), {"shuffle": False, "num_workers": 3}, "num_workers=3 cannot share 2 shards"),
    ],
)
def test_data_and_arguments(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    """Invalid data sets and arguments are refused before anything is loaded."""
    with pytest.raises(DataError, match=message):
        ab.batches(dataset, **{"effective_batch_size": 4, **arguments})


@pytest.mark.parametrize(
    ("parts", "num_shards", "message"),
    [
        ([], None, "has 0 shards and needs at least 1"),
        ([[1], (i for i in range(2))], None, "shard 1 is a generator"),
        (["a.txt", "b.txt"], None, "shard 0 is of type str"),
        (Stream(), None, "the shards are of type Stream. Pass a list"),
        ([[1], [2]], 2, "num_shards=2 is for a function only; leave it out for a list of 2 shards"),
        (range, None, "num_shards=None must be at least 1"),
        (range, 0, "num_shards=0 must be at least 1"),
    ],
)
def test_shards(parts: Any, num_shards: int | None, message: str) -> None:
    """Shards that cannot be counted or read again are refused."""
    with pytest.raises(DataError, match=message):
        ab.Shards(parts, num_shards=num_shards)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="pinning is possible here")
def test_pinning_without_an_accelerator() -> None:
    """`pin_memory=True` without an accelerator is an error; None works on every machine."""
    with pytest.raises(
        DataError, match=r"pin_memory=True needs an accelerator .* here is no accelerator. Leave it at None"
    ):
        ab.batches(range(9), effective_batch_size=4, pin_memory=True)
