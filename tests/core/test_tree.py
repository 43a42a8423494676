"""Batches of any structure can be counted, sliced and reassembled."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import default_collate

import anybatch as ab
from anybatch.core.tree import copied, count_samples, flatten_batch, join_samples, slice_samples, tensors_of
from anybatch.errors import DataError
from tests.faults import sees
from tests.raising import raises


class Pair(NamedTuple):
    """A named tuple."""

    one: Any
    other: Any


@dataclass(frozen=True)
class Example:
    """A dataclass with a derived field."""

    words: torch.Tensor
    mask: Any
    name: str = "train"
    total: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", int(self.words.sum()))


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, as tokenizers return."""

    def __repr__(self) -> str:
        return f"Encoding({self.data!r})"


def concatenated(parts: list[Any]) -> Any:  # noqa: PLR0911 (one line per container)
    """Concatenate slices of a batch: the inverse, written independently, container by container."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.dim() else first
    if isinstance(first, np.ndarray):
        return np.concatenate(parts) if first.ndim else first
    if isinstance(first, (dict, UserDict)):
        return type(first)({key: concatenated([part[key] for part in parts]) for key in first})
    if isinstance(first, Example):
        return Example(
            concatenated([part.words for part in parts]), concatenated([part.mask for part in parts]), first.name
        )
    if isinstance(first, Pair):
        return Pair(*(concatenated([part[number] for part in parts]) for number in range(2)))
    if isinstance(first, (list, tuple)) and any(isinstance(item, (torch.Tensor, dict)) for item in first):
        return type(first)(concatenated([part[number] for part in parts]) for number in range(len(first)))
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if isinstance(first, tuple) and first and all(isinstance(item, str) for item in first):
        return tuple(item for part in parts for item in part)
    return first


def leaves(number: int) -> st.SearchStrategy[Any]:
    """Return leaves with this many samples, and leaves that belong to every sample."""
    numbers = torch.arange(number * 3).reshape(number, 3)
    carrying = [
        numbers,
        numbers[:, 0].double(),
        numbers.to(torch.float16)[:, :0],
        np.arange(number * 2).reshape(number, 2),
        [f"sample {index}" for index in range(number)],
        list(range(number)),
    ]
    if number:
        carrying.append(tuple(f"sample {index}" for index in range(number)))
    constant = [3, 0.5, None, "all", torch.tensor(2.0), True]
    return st.sampled_from([*carrying, *constant])


def trees(number: int) -> st.SearchStrategy[Any]:
    """Return nested batches of this many samples."""

    def grow(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.sampled_from(["x", "y", "z"])
        mappings = st.dictionaries(keys, children, min_size=1, max_size=3)
        return st.one_of(
            mappings,
            mappings.map(OrderedDict),
            mappings.map(Encoding),
            st.tuples(children, children).map(lambda pair: Pair(*pair)),
            children.map(lambda child: Example(torch.arange(number), child)),
            children.map(lambda child: (torch.ones(number), child)),
            children.map(lambda child: [torch.ones(number, 2), child]),
        )

    return st.recursive(leaves(number), grow, max_leaves=8).map(lambda tree: {"x": torch.arange(number), "rest": tree})


@sees(
    "a slice of a batch lacks its last sample",
    "src/anybatch/core/tree.py",
    "leaf[start:stop] if carries_samples(leaf)",
    "leaf[start : max(start + 1, stop - 1)] if carries_samples(leaf)",
)
@sees(
    "a slice of plain fields lacks its last sample",
    "src/anybatch/core/tree.py",
    "rows = [field[start:stop] for",
    "rows = [field[start : max(start + 1, stop - 1)] for",
    also=["tests/examples/test_ladder_against_engine.py::test_trained_parameters"],
)
@pytest.mark.slow
@given(data=st.data(), number=st.integers(1, 7))
def test_slices_put_together_are_the_batch(data: st.DataObject, number: int) -> None:
    """Slicing any batch anywhere and concatenating the pieces gives the batch."""
    batch = data.draw(trees(number))
    cuts = sorted(data.draw(st.sets(st.integers(1, number), max_size=3)) | {number})
    bounds = list(zip([0, *cuts[:-1]], cuts, strict=True))
    pieces = [slice_samples(batch, start, stop) for start, stop in bounds]

    assert count_samples(batch) == number
    assert [count_samples(piece) for piece in pieces] == [stop - start for start, stop in bounds]
    joined = concatenated(pieces)
    assert repr(joined) == repr(batch)  # the types
    assert all(map(torch.equal, tensors_of(joined), tensors_of(batch)))  # repr rounds values


def test_batch_encodings_keep_their_type() -> None:
    """The output of a transformers tokenizer is sliced into objects of the same class."""
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)})
    piece = slice_samples(batch, 1, 3)

    assert type(piece) is transformers.BatchEncoding
    assert count_samples(batch) == 4
    assert piece.input_ids.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert piece["labels"].tolist() == [1, 2]


def test_copies_of_a_defaultdict_have_its_factory() -> None:
    """A copied defaultdict creates entries as before, and shares none."""
    metrics = {"train": defaultdict(list, {"loss": [1.0]})}
    twin = copied(metrics)
    twin["train"]["loss"].append(2.0)
    twin["train"]["norm"].append(3.0)

    assert metrics == {"train": {"loss": [1.0]}}
    assert twin == {"train": {"loss": [1.0, 2.0], "norm": [3.0]}}


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.zeros(2), "a"), (torch.ones(2), "b"), (torch.ones(2), "c")],
        [{"x": torch.zeros(2), "y": "a"}, {"x": torch.ones(2), "y": "b"}, {"x": torch.ones(2), "y": "c"}],
    ],
    ids=["tuples", "dicts"],
)
def test_strings_belong_to_their_samples(samples: list[Any]) -> None:
    """Strings from torch's default collate, as a tuple or list, are sliced with their samples."""
    batch = default_collate(samples)
    piece = slice_samples(batch, 1, 3)
    words = piece["y"] if isinstance(piece, dict) else piece[1]

    assert count_samples(batch) == 3
    assert list(words) == ["b", "c"]


@pytest.mark.parametrize("batch", [1.0, None, "text", {}, {"scale": 2}, torch.tensor(1.0), ("a", torch.tensor(1.0))])
def test_a_batch_without_samples_is_refused(batch: Any) -> None:
    """A batch in which no leaf has a first axis raises."""
    with raises(DataError, "uncountable"):
        count_samples(batch)


def test_flatten_and_rebuild() -> None:
    """The tensors of a batch can be replaced in place, and the structure keeps none of them."""
    words, mask = torch.arange(6.0).reshape(3, 2), torch.ones(3)
    batch = {"pair": Pair(Example(words, [mask, 4]), torch.tensor(2.0)), "name": "train"}
    tensors, rebuild = flatten_batch(batch)

    assert [tensor is one for tensor, one in zip(tensors, (words, mask), strict=False)] == [True, True]
    again, other = rebuild(tensors), rebuild(2 * tensor for tensor in tensors)
    assert again["pair"].one.words is words
    assert again["pair"].one.mask[0] is mask
    assert again["pair"].one.mask[1:] == [4]
    assert (again["pair"].one.total, other["pair"].one.total) == (15, 30)
    assert float(other["pair"].other) == 4.0
    assert other["name"] == "train"


def in_rows(kind: str) -> torch.Tensor:
    """Return seven samples in a tensor that torch cannot slice."""
    rows = [torch.arange(3.0 * (1 + n % 3)).reshape(-1, 3) + n for n in range(7)]
    if kind == "sparse":
        return torch.stack([row[0] * (n % 2) for n, row in enumerate(rows)]).to_sparse()
    return torch.nested.nested_tensor(rows, layout=torch.jagged if kind == "jagged" else torch.strided)


def listed(tensor: torch.Tensor) -> list[list[float]]:
    """Return a tensor's samples as lists."""
    rows = tensor.unbind() if tensor.is_nested else tensor.to_dense()
    return [row.flatten().tolist() for row in rows]


@sees(
    "slices of nested tensors start at the first row",
    "src/anybatch/core/tree.py",
    "list(tensor.unbind()[start:stop])",
    "list(tensor.unbind()[: stop - start])",
    cases=["jagged"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", ["sparse", "jagged", "nested"])
def test_sparse_and_nested_tensors_are_cut_by_samples(kind: str) -> None:
    """Pieces have the rows in order, and concatenated they are the tensor."""
    batch: dict[str, Any] = {"x": in_rows(kind), "name": "kept"}
    pieces = [slice_samples(batch, start, stop) for start, stop in ((0, 3), (3, 4), (4, 7))]
    assert count_samples(batch) == 7
    assert [row for piece in pieces for row in listed(piece["x"])] == listed(batch["x"])
    assert [len(listed(piece["x"])) for piece in pieces] == [3, 1, 3]
    assert listed(join_samples(pieces)["x"]) == listed(batch["x"])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_a_layout_without_rows_is_refused() -> None:
    """The error names the layout and what to convert it to."""
    with raises(DataError, "layout_without_rows"):
        slice_samples({"x": torch.eye(4).to_sparse_csr()}, 0, 2)


def test_leaves_that_cannot_be_joined_are_named() -> None:
    """The error for batches that cannot be joined names the leaf, beginning with "batch"."""
    ones = torch.ones(2, 3)
    with pytest.raises(DataError, match=r"batch\['w'\] is 1.0 in one and 2.0"):
        join_samples([{"x": ones, "w": 1.0}, {"x": ones, "w": 2.0}])
    with pytest.raises(DataError, match="batch is "):
        join_samples([ones, torch.ones(2, 4)])


class AnyAttribute(dict[str, Any]):
    """A dict whose keys are also attributes; a missing one is None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def test_a_dict_with_any_attribute_is_a_batch() -> None:
    """Fields with names that `ab.batches` uses, and attributes that no field has, do not change how a batch is cut."""
    batch = AnyAttribute(inputs=torch.randn(6, 3), sizes=torch.arange(6), lengths=torch.arange(6))
    assert torch.equal(slice_samples(batch, 2, 4)["sizes"], torch.tensor([2, 3]))

    def loss(net: nn.Module, part: Any) -> torch.Tensor:
        found: torch.Tensor = (net(part.inputs).squeeze(1) - part.sizes).square().mean()
        return found

    model = nn.Linear(3, 1)
    loss(model, batch).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = [parameter.detach() - cast("torch.Tensor", parameter.grad) for parameter in model.parameters()]
    optimizer.zero_grad()
    ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4).step(batch)
    for parameter, updated in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter, updated, rtol=1e-5)
