"""Lists in a batch, of fields or of samples, and batch classes that slice themselves."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from anybatch.core.tree import (
    SampleList,
    as_fields,
    count_samples,
    join_samples,
    mark_and_count,
    moved_to,
    slice_samples,
)
from anybatch.errors import DataError
from tests.raising import raises


def images(number: int, sizes: tuple[int, ...] = (5, 6, 7)) -> list[torch.Tensor]:
    """Return images of 3 channels and different sizes."""
    return [torch.full((3, sizes[k % len(sizes)], 4), float(k)) for k in range(number)]


def targets(number: int, boxes: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Return this many dicts of boxes."""
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
    "images and targets, with labels": (images(6), targets(6, boxes=3), torch.arange(6)),
    "pairs that were not collated": [(wave, torch.tensor(k)) for k, wave in enumerate(waves(6))],
    "arrays": [wave.numpy() for wave in waves(6)],
    "dicts that were not collated": [{"x": wave, "y": k} for k, wave in enumerate(waves(6))],
    "marked": SampleList([torch.zeros(50, 2)] * 6),
}

BY_FIELDS: dict[str, Any] = {
    "as torch collates": [torch.zeros(6, 2), torch.arange(6)],
    "regression": [torch.zeros(6, 1), torch.zeros(6, 1)],
    "a tuple": tuple(torch.zeros(6, 2) for _ in range(5)),
    "crops": ([torch.zeros(6, 3, 8, 8)] * 2 + [torch.zeros(6, 3, 4, 4)] * 6, torch.arange(6)),
    "two parts": ({"x": torch.zeros(6)}, {"x": torch.zeros(6)}),
    "parts with other names": [{"x": torch.zeros(6)}, {"y": torch.zeros(6)}],
    "sizes": {"x": torch.zeros(6, 2), "sizes": ((32, 32), (16, 16))},
}


@pytest.mark.parametrize("name", BY_ENTRIES)
def test_a_list_of_samples_is_cut_by_its_entries(name: str) -> None:
    """If lengths allow no other reading, a list has one sample per entry, and so do its pieces."""
    batch = BY_ENTRIES[name]
    assert count_samples(batch) == 6
    pieces = [slice_samples(batch, k, k + 1) for k in range(6)]
    assert [count_samples(piece) for piece in pieces] == [1] * 6
    assert str(join_samples(pieces)) == str(slice_samples(batch, 0, 6))
    halves = [slice_samples(slice_samples(batch, 2, 6), 1, 3)]
    assert str(halves[0]) == str(slice_samples(batch, 3, 5))


@pytest.mark.parametrize("name", BY_FIELDS)
def test_a_list_of_fields_is_cut_in_each(name: str) -> None:
    """A tuple, and a list that looks like inputs and targets, contains fields."""
    batch = BY_FIELDS[name]
    assert count_samples(batch) == 6
    assert count_samples(slice_samples(batch, 2, 4)) == 2
    assert type(slice_samples(batch, 2, 4)) is type(batch)


@dataclass
class Sample:
    """A sample as an object."""

    words: torch.Tensor
    tags: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "numbers"),
    [
        ([torch.zeros(50, 2)] * 6, (6, 50)),
        ({"windows": [torch.zeros(50, 2)] * 6}, (6, 50)),
        ({"windows": [torch.zeros(6, 2)] * 6, "label": torch.arange(6)}, (6, 6)),
        (images(6), (3, 6)),
        ((images(6), targets(6, boxes=3)), (3, 6)),
        ({"boxes": [torch.zeros(2, 4)] * 2, "label": torch.arange(2)}, (2, 2)),
        ([{"ids": torch.zeros(8), "tags": torch.zeros(8)}] * 6, (6, 8)),
        ([(torch.zeros(3, 9, 9), k) for k in range(6)], (3, 6)),
        ([[torch.zeros(3, 9, 9), k] for k in range(6)], (3, 6)),
        ([Sample(torch.zeros(8), torch.zeros(8))] * 6, (6, 8)),
        (list(zip(waves(6), waves(6), strict=True)), (2, 6)),
        (list(zip(*zip(waves(6), waves(6), strict=True), strict=True)), (2, 6)),
    ],
)
def test_a_list_with_two_readings_is_refused(batch: Any, numbers: tuple[int, int]) -> None:
    """If a list can be read as fields and as samples, the error has both numbers and how to choose."""
    with pytest.raises(DataError) as caught:
        count_samples(batch)
    assert sorted(int(number) for number in re.findall(r"(\d+) samples,", str(caught.value))) == list(numbers)
    assert "anybatch.data.SampleList" in str(caught.value)


def bodies(length: int) -> dict[str, Any]:
    """Return one sample of each kind, with tensors of one length."""
    rows = torch.arange(float(length))
    return {
        "tensor": rows,
        "pair": (rows, torch.tensor(1.0)),
        "number": (rows, 1),
        "list": [rows, 2 * rows],
        "dict": {"ids": rows, "tags": rows},
        "object": Sample(rows, rows),
        "nested": {"ids": {"a": rows}, "size": (2, 2)},
    }


@pytest.mark.slow
@given(
    kind=st.sampled_from(sorted(bodies(1))),
    lengths=st.lists(st.integers(1, 6), min_size=4, max_size=7),
    place=st.sampled_from(["alone", "in a dict", "in a tuple", "in a list"]),
    label=st.booleans(),
)
def test_a_list_of_samples_is_never_read_as_fields(kind: str, lengths: list[int], place: str, label: bool) -> None:
    """A list of samples is read as such or raises; with a known number, it raises only if both readings fit."""
    samples = [bodies(length)[kind] for length in lengths]
    number = len(samples)
    others = [torch.arange(number)] if label else []
    batch: Any = {
        "alone": samples,
        "in a dict": {"samples": samples, "others": others and others[0]} if label else {"samples": samples},
        "in a tuple": (samples, *others),
        "in a list": [samples, *others],
    }[place]
    for known in (None, number):
        try:
            marked, found = mark_and_count(batch, known)
        except DataError as error:
            assert known is None or f"{number} samples, one for each entry" in str(error)  # noqa: PT017
            continue
        assert found == number
        halves = [slice_samples(marked, 0, 2), slice_samples(marked, 2, number)]
        assert [count_samples(half) for half in halves] == [2, number - 2]
        assert str(join_samples(halves)) == str(marked)


@pytest.mark.slow
@given(
    number=st.integers(1, 6),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=6),
    nested=st.booleans(),
)
def test_fields_of_the_default_collate_are_never_read_as_samples(number: int, widths: list[int], nested: bool) -> None:
    """The output of torch's default collate on tuples is read as fields or raises; marked, it is read as fields."""
    rows = [tuple(torch.full((width,), float(k)) for width in widths) for k in range(number)]
    batch = default_collate([(row, row) for row in rows] if nested else rows)
    try:
        assert count_samples(batch) == number
    except DataError as error:
        assert "two ways" in str(error)  # noqa: PT017
    marked = as_fields(batch)
    assert isinstance(marked, list)
    assert count_samples(marked) == number
    for k in range(number):
        assert count_samples(slice_samples(marked, k, k + 1)) == 1
    assert str(join_samples([slice_samples(marked, k, k + 1) for k in range(number)])) == str(marked)


class Graphs:
    """A custom batch class: nodes of several graphs, and labels of a few of them."""

    def __init__(self, parts: list[torch.Tensor], device: str = "cpu") -> None:
        self.parts = parts
        self.device = device

    def __len__(self) -> int:
        return len(self.parts)

    def slice_samples(self, start: int, stop: int) -> "Graphs":
        return Graphs(self.parts[start:stop], self.device)

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.parts, str(device))


@dataclass
class SemiSupervised:
    """Labeled samples, and unlabeled ones: two for each labeled one."""

    labelled: torch.Tensor
    unlabelled: torch.Tensor


class Paired(SemiSupervised):
    """The same, sliced by labeled samples."""

    def __len__(self) -> int:
        return len(self.labelled)

    def slice_samples(self, start: int, stop: int) -> "Paired":
        return Paired(self.labelled[start:stop], self.unlabelled[2 * start : 2 * stop])


def test_parts_of_different_length() -> None:
    """Parts of different lengths raise with the fix; a class that defines slicing works."""
    parts = torch.zeros(4, 2), torch.arange(8)
    with raises(DataError, "uncountable"):
        count_samples(SemiSupervised(*parts))
    assert count_samples(Paired(*parts)) == 4
    assert slice_samples(Paired(*parts), 1, 3).unlabelled.tolist() == [2, 3, 4, 5]
    assert moved_to(Paired(*parts), torch.device("meta")).labelled.is_meta
