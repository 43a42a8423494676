"""Lists in a batch: of fields, or with an entry for each sample; and batches that are cut by themselves."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from anybatch.core.tree import SampleList, count_samples, join_samples, moved_to, slice_samples
from anybatch.errors import DataError
from tests.faults import sees


def images(number: int, sizes: tuple[int, ...] = (5, 6, 7)) -> list[torch.Tensor]:
    """Return images of 3 channels and different sizes."""
    return [torch.full((3, sizes[k % len(sizes)], 4), float(k)) for k in range(number)]


def targets(number: int, boxes: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Return as many dicts of boxes."""
    return [{"boxes": torch.full((boxes or 1 + k, 4), float(k))} for k in range(number)]


def waves(number: int) -> list[torch.Tensor]:
    """Return recordings of different lengths."""
    return [torch.full((10 + k,), float(k)) for k in range(number)]


BY_ENTRIES: dict[str, Any] = {
    "recordings": waves(6),
    "images, with labels": {"image": images(6), "label": torch.arange(6)},
    "windows of one length, with labels": ([torch.zeros(50, 2)] * 6, torch.arange(6)),
    "images and targets": (images(6), targets(6)),
    "images and targets as tuples": (tuple(images(6)), tuple(targets(6))),
    "images and targets in lists": [images(6), targets(6)],
    "images and targets, by chance with as many boxes as channels": (images(6), targets(6, boxes=3)),
    "dicts that were not collated": [{"x": wave, "y": k} for k, wave in enumerate(waves(6))],
    "marked": SampleList([torch.zeros(50, 2)] * 6),
}

BY_FIELDS: dict[str, Any] = {
    "as torch collates": [torch.zeros(6, 2), torch.arange(6)],
    "regression": [torch.zeros(6, 1), torch.zeros(6, 1)],
    "a tuple": tuple(torch.zeros(6, 2) for _ in range(5)),
    "crops": {"crops": [torch.zeros(6, 3, 8, 8)] * 2 + [torch.zeros(6, 3, 4, 4)] * 6},
    "two parts": ({"x": torch.zeros(6)}, {"x": torch.zeros(6)}),
}


@sees(
    "recordings are cut along time",
    "src/anybatch/core/tree.py",
    "    if len(by_entries) == 1 and (",
    "    if len(by_entries) == 7 and (",
)
@pytest.mark.parametrize("name", BY_ENTRIES)
def test_a_list_of_samples_is_cut_by_its_entries(name: str) -> None:
    """Where the lengths leave no other reading, a list has a sample in each entry; so do its pieces, however small."""
    batch = BY_ENTRIES[name]
    assert count_samples(batch) == 6
    pieces = [slice_samples(batch, k, k + 1) for k in range(6)]
    assert [count_samples(piece) for piece in pieces] == [1] * 6
    assert str(join_samples(pieces)) == str(slice_samples(batch, 0, 6))
    halves = [slice_samples(slice_samples(batch, 2, 6), 1, 3)]
    assert str(halves[0]) == str(slice_samples(batch, 3, 5))


@pytest.mark.parametrize("name", BY_FIELDS)
def test_a_list_of_fields_is_cut_in_each(name: str) -> None:
    """A tuple, and a list of what looks like inputs and targets, holds fields."""
    batch = BY_FIELDS[name]
    assert count_samples(batch) == 6
    assert count_samples(slice_samples(batch, 2, 4)) == 2
    assert type(slice_samples(batch, 2, 4)) is type(batch)


@sees(
    "a list with two readings is taken for fields",
    "src/anybatch/core/tree.py",
    "len(tensors) == len(node) > _MOST_FIELDS_ALIKE",
    "len(tensors) == len(node) > 99",
)
@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(50, 2)] * 6,
        {"windows": [torch.zeros(50, 2)] * 6},
        {"windows": [torch.zeros(6, 2)] * 6, "label": torch.arange(6)},
        [(wave, torch.tensor(k)) for k, wave in enumerate(waves(6))],
        list(zip(waves(6), waves(6), strict=True)),
        list(zip(*zip(waves(6), waves(6), strict=True), strict=True)),
    ],
)
def test_what_can_be_read_in_two_ways_is_asked(batch: Any) -> None:
    """Many tensors of one shape may be samples or fields: both numbers are named, and how to say which."""
    with pytest.raises(DataError, match=r"read in two ways: \d+ samples, .*, or 6 samples, one for .*SampleList"):
        count_samples(batch)


class Graphs:
    """A batch of a class of its own: nodes of several graphs, and labels of a few of them."""

    def __init__(self, parts: list[torch.Tensor], device: str = "cpu") -> None:
        self.parts = parts
        self.device = device

    def __len__(self) -> int:
        return len(self.parts)

    def slice_samples(self, start: int, stop: int) -> "Graphs":
        return Graphs(self.parts[start:stop], self.device)

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.parts, str(device))


def test_a_batch_of_ones_own_is_cut_by_itself() -> None:
    """An object with `__len__`, `slice_samples` and `to` is a batch, or a part of one."""
    graphs = Graphs(waves(6))
    piece = slice_samples({"graphs": graphs, "label": torch.arange(6)}, 2, 5)
    assert count_samples(graphs) == count_samples({"graphs": graphs, "label": torch.arange(6)}) == 6
    assert [len(part) for part in piece["graphs"].parts] == [12, 13, 14]
    assert moved_to(piece, torch.device("meta"))["graphs"].device == "meta"


@dataclass
class SemiSupervised:
    """Labelled samples, and unlabelled ones beside them, twice as many."""

    labelled: torch.Tensor
    unlabelled: torch.Tensor


class Paired(SemiSupervised):
    """The same, cut by labelled samples."""

    def __len__(self) -> int:
        return len(self.labelled)

    def slice_samples(self, start: int, stop: int) -> "Paired":
        return Paired(self.labelled[start:stop], self.unlabelled[2 * start : 2 * stop])


def test_parts_of_different_length() -> None:
    """Parts of different length are refused with what to do; a class that knows how is cut."""
    parts = torch.zeros(4, 2), torch.arange(8)
    with pytest.raises(
        DataError, match=r"labelled has 4 samples, batch\.unlabelled has 8.*slice_samples\(start, stop\)"
    ):
        count_samples(SemiSupervised(*parts))
    assert count_samples(Paired(*parts)) == 4
    assert slice_samples(Paired(*parts), 1, 3).unlabelled.tolist() == [2, 3, 4, 5]
    assert moved_to(Paired(*parts), torch.device("meta")).labelled.is_meta
