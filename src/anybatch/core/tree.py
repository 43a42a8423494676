"""Chapter 4: batches of any shape. A batch is a tree; its leaves that carry samples are cut along their first axis.

**The rule.** A mapping (dict, `BatchEncoding`), dataclass or named tuple holds fields, and so does a tuple that is the
batch itself. Each field has the sample as its first axis: tensors of at least one axis, numpy arrays, plain lists (of
strings, say), tuples of strings, which torch's default collate makes, and objects with `slice_samples(start, stop)`
and `__len__`. Everything else (numbers, None, strings, tensors without axes) belongs to every sample.

A list of tensors or containers, or a tuple of them inside a batch, can be read in two ways: it holds fields, or it has
one entry per sample (a `SampleList` always has). The reading that fits the lengths of all other leaves is used. If both
readings fit, the batch is refused. One exception: a batch that is a list of two or three tensors of equal length holds
fields, as torch's default collate returns them.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import DataError

_MAX_PLAIN_FIELDS = 3
"""Tensors of a list that holds fields without further evidence: more of them are more likely samples."""
Batch = Any
"""Any nested batch. There is no narrower type: the user's collate function decides."""


class SampleList(list[Any]):
    """A list with one entry for each sample, such as images or recordings of different sizes; it is cut by entries."""

    __slots__ = ()


class FieldList(list[Any]):
    """A list that holds fields, although its entries could be samples."""

    __slots__ = ()


class FieldTuple(tuple[Any, ...]):
    """The same as a tuple."""

    __slots__ = ()


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a nested batch, by the rule at the top of this module.

    Raises:
        DataError: no leaf carries samples, leaves disagree about how many, or a list can be read in two ways.
    """
    return read_samples(batch)[1]


def read_samples(batch: Batch, num_samples: int | None = None) -> tuple[Batch, int]:
    """Return a batch whose lists are marked as samples or as fields, and its number of samples.

    Parts of a marked batch are read like the whole. Lists whose entries cannot be samples need no mark.

    Args:
        batch: any nested batch.
        num_samples: the number of samples, where it is known: if it fits, other readings do not count.

    Raises:
        DataError: see `count_samples`.
    """
    if (fields := _plain_fields(batch)) and len(heights := set(map(len, fields))) == 1:
        if num_samples is None or num_samples in heights:
            return batch, heights.pop()
    lengths = {path: _length(leaf) for path, leaf in _leaves(batch, "batch", cutting=True) if _carries_samples(leaf)}
    lists = dict(_unmarked_lists(batch, "batch"))
    numbers = set(lengths.values())
    if num_samples is None and len(numbers) == 1 and _is_short(batch):
        return batch, numbers.pop()
    numbers |= {len(node) for node in lists.values()}
    if num_samples in numbers:
        numbers = {num_samples}
    readings = {number: entries for number in sorted(numbers) if (entries := _entries(batch, number)) is not None}
    if not readings:
        raise DataError(_uncountable(batch, lengths | {path: len(node) for path, node in lists.items()}))
    if len(readings) > 1:
        raise DataError(_in_two_ways("a list in the batch", readings))
    number, entries = readings.popitem()
    return (_with_marks(batch, entries) if lists else batch), number


def as_fields(batch: Batch) -> Batch:
    """Return a batch of torch's default collate with its lists marked: all of them hold fields."""
    has_lists = not _plain_fields(batch) and any(True for _ in _unmarked_lists(batch, ""))
    return _with_marks(batch, frozenset()) if has_lists else batch


def slice_samples(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples `start` to `stop` (exclusive) of a nested batch; tensors are views, nothing is copied.

    Args:
        batch: any nested batch.
        start: position of the first sample, from 0 on.
        stop: position behind the last sample.
    """
    return slice_read(_marked(batch), start, stop)


def slice_read(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples `start` to `stop` (exclusive) of a batch as `read_samples` returns it, whose lists are marked."""
    if fields := _plain_fields(batch):
        rows = [field[start:stop] for field in fields]
        return dict(zip(batch, rows, strict=True)) if type(batch) is dict else type(batch)(rows)

    def piece(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            if leaf.is_nested or leaf.layout is not torch.strided:
                return _rows_of_other_layouts(leaf, start, stop)
            return leaf[start:stop] if leaf.dim() else leaf
        if hasattr(leaf, "slice_samples"):
            return leaf.slice_samples(start, stop)
        if isinstance(leaf, SampleList):
            return SampleList(leaf[start:stop])
        return leaf[start:stop] if _carries_samples(leaf) else leaf

    return _map_leaves(batch, piece, cutting=True)


def _rows_of_other_layouts(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return rows of a nested or sparse tensor, which torch cannot slice; a copy.

    Raises:
        DataError: torch cannot take rows of this layout.
    """
    if tensor.is_nested:
        return _nested(list(tensor.unbind()[start:stop]), tensor.layout)
    if tensor.layout is torch.sparse_coo:
        return torch.narrow_copy(tensor, 0, start, stop - start)
    message = (
        f"a tensor of layout {tensor.layout} cannot be cut into samples. Convert it with to_sparse_coo(), of which "
        "rows can be taken, or with to_dense()."
    )
    raise DataError(message)


def _nested(rows: list[torch.Tensor], layout: torch.layout) -> torch.Tensor:
    made: torch.Tensor = torch.nested.as_nested_tensor(rows, layout=layout)
    return made


def pick_samples(batch: Batch, positions: Sequence[int]) -> Batch:
    """Return the samples at some positions of a nested batch, in that order.

    Raises:
        DataError: the batch is of a class of the user's own, which can be cut and not put in order.
    """
    if isinstance(positions, range) and positions.step == 1:
        return slice_samples(batch, positions.start, positions.stop)
    return join_samples([slice_samples(batch, position, position + 1) for position in positions])


def join_samples(batches: Sequence[Batch]) -> Batch:
    """Return batches of one structure as one, with their samples in this order: the inverse of `slice_samples`.

    Raises:
        DataError: they cannot be joined: padded to different lengths, say, or of a class of the user's own.
    """
    if len(batches) == 1:
        return batches[0]
    parts = [_marked(batch) for batch in batches]
    rows = [list(_leaves(part, "batch", cutting=True)) for part in parts]
    if len({tuple(path for path, _ in row) for row in rows}) > 1:
        message = (
            f"batches of a loader cannot be joined: one holds {', '.join(path for path, _ in rows[0])}, another "
            "something else. Yield the same fields in every batch, or batches of the whole size."
        )
        raise DataError(message)
    whole = iter([_joined(row[0][0], [leaf for _, leaf in row]) for row in zip(*rows, strict=True)])
    return _map_leaves(parts[0], lambda _: next(whole), cutting=True)


def _joined(path: str, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
    first = leaves[0]
    if not _carries_samples(first):
        other = next((leaf for leaf in leaves if not _are_equal(first, leaf)), first)
        if other is not first:
            message = (
                f"batches of a loader cannot be joined: {path} is {first} in one and {other} in another, and it belongs "
                "to no sample. Leave it out and compute it in the loss or its count, or use "
                "ab.batches(dataset, effective_batch_size=...), or have the loader yield batches of the whole size."
            )
            raise DataError(message)
        return first
    if isinstance(first, list):
        return type(first)(itertools.chain.from_iterable(leaves))
    if isinstance(first, tuple):
        return tuple(itertools.chain.from_iterable(leaves))
    if isinstance(first, torch.Tensor) and first.is_nested:
        return _nested([row for leaf in leaves for row in leaf.unbind()], first.layout)
    if isinstance(first, torch.Tensor) and len({leaf.shape[1:] for leaf in leaves}) == 1:
        return torch.cat(list(leaves))
    shapes = " and ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in leaves if hasattr(leaf, "shape")))
    message = (
        f"batches of a loader cannot be joined: {path} is {shapes or f'of type {type(first).__name__}'}. Use "
        "ab.batches(dataset, effective_batch_size=..., collate=...), which pads each micro-batch on its own; or pad "
        "all batches to one length, or have the loader yield batches of the whole size."
    )
    raise DataError(message)


def _are_equal(one: Any, other: Any) -> bool:  # noqa: ANN401 (whatever a batch holds)
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    try:
        return type(one) is type(other) and bool(one == other)
    except (TypeError, ValueError):  # what compares element by element
        return False


def resize_samples(batch: Batch, num_samples: int, resize: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch of the same structure with another number of samples.

    Args:
        batch: any nested batch.
        num_samples: samples of the result.
        resize: makes a tensor of `num_samples` samples from one of the batch; lists and arrays are repeated in turn.
    """

    def resized(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            return resize(leaf)
        if not _carries_samples(leaf):
            return leaf
        numbers = [number % len(leaf) for number in range(num_samples)]
        return type(leaf)(leaf[number] for number in numbers) if isinstance(leaf, (list, tuple)) else leaf[numbers]

    return _map_leaves(_marked(batch), resized, cutting=True)


def map_tensors(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the same tree with `function` applied to every tensor; all other leaves stay as they are.

    Args:
        batch: any nested batch.
        function: a tensor -> what takes its place; called depth first.
    """
    return _map_leaves(batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def copied(batch: Batch, clone: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Batch:
    """Return the same tree with every tensor, list and array copied, so that nothing done to it reaches the batch."""

    def copy_of(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            return clone(leaf)
        return copy.copy(leaf) if isinstance(leaf, list) or hasattr(leaf, "__array__") else leaf

    return _map_leaves(batch, copy_of)


def map_leaves(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Return the same tree with `function` applied to every leaf; a list of samples and what can be cut are leaves.

    Args:
        batch: any nested batch, or anything nested as one.
        function: a leaf -> what takes its place; called depth first.
    """
    return _map_leaves(batch, function, cutting=True)


def merge_trees(trees: Sequence[Batch], merge: Callable[[str, Sequence[Any]], Any]) -> Batch:
    """Return trees of one structure as one tree.

    Args:
        trees: at least one.
        merge: function (path, the leaves that stand there in the trees) -> the leaf of the result; called depth first.

    Raises:
        DataError: the trees have different structures.
    """
    rows = [list(_leaves(tree, "", cutting=True)) for tree in trees]
    if len({tuple(path for path, _ in row) for row in rows}) > 1:
        shown = [", ".join(path or "one value" for path, _ in row) or "nothing" for row in rows]
        message = f"trees to be merged have different structures: {' and '.join(dict.fromkeys(shown))}."
        raise DataError(message)
    merged = iter([merge(row[0][0], [leaf for _, leaf in row]) for row in zip(*rows, strict=True)])
    return _map_leaves(trees[0], lambda _: next(merged), cutting=True)


def has_rows(leaf: Any, number: int) -> bool:  # noqa: ANN401 (a tensor, list, array or anything else)
    """Whether a leaf carries samples and has so many of them."""
    return _carries_samples(leaf) and _length(leaf) == number


def take_apart(batch: Batch) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], Batch]]:
    """Return every tensor of a nested batch, and a function that builds the same structure around other tensors.

    The function takes as many tensors, in the same order, and keeps none of those of the batch alive.
    """
    tensors: list[torch.Tensor] = []

    def take_out(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        # Without rows: the form keeps the type and device of each leaf, and none of its memory.
        return tensor.new_zeros((0, *tensor.shape[1:])) if tensor.dim() else tensor.new_zeros(())

    form = map_tensors(batch, take_out)

    def put_together(others: Iterable[torch.Tensor]) -> Batch:
        remaining = iter(others)
        return map_tensors(form, lambda _: next(remaining))

    return tensors, put_together


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested batch, depth first."""
    if fields := _plain_fields(batch):
        return iter(fields)
    return (leaf for _, leaf in _leaves(batch, "batch") if isinstance(leaf, torch.Tensor))


def moved_to(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a batch with its tensors on a device; an object that can be cut moves itself, by its `to(device)`."""

    def moved(leaf: Any) -> Any:  # noqa: ANN401 (a tensor or anything else)
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if hasattr(leaf, "slice_samples") and hasattr(leaf, "to") else leaf

    return _map_leaves(batch, moved)


def _marked(batch: Batch) -> Batch:
    """Return a batch with its lists marked; most batches have none to look at."""
    return read_samples(batch)[0] if any(True for _ in _unmarked_lists(batch, "")) else batch


def _with_marks(node: Batch, entries: frozenset[int], *, is_top: bool = True) -> Batch:
    """Return a batch in which lists with an id in `entries` are marked as samples, and other unmarked ones as fields."""
    if id(node) in entries:
        return SampleList(node)
    if _is_cut_whole(node):
        return node
    marked = _with_children(node, lambda child: _with_marks(child, entries, is_top=False))
    if not _may_be_samples(node, is_top=is_top) or (is_top and _is_short(node)):
        return marked
    return FieldTuple(marked) if isinstance(marked, tuple) else FieldList(marked)


def _unmarked_lists(node: Batch, path: str, *, is_top: bool = True) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield path and value of every list or tuple whose entries may be samples and that has no mark."""
    if not _is_container(node) or _is_cut_whole(node):
        return
    if _may_be_samples(node, is_top=is_top):
        yield path, node
    for key, child in _children(node):
        yield from _unmarked_lists(child, path + key, is_top=False)


def _may_be_samples(node: Batch, *, is_top: bool) -> bool:
    """Whether the entries of a list or tuple are of one kind, so that each may be a sample."""
    if not isinstance(node, (list, tuple)) or not node or (is_top and isinstance(node, tuple)):
        return False
    if isinstance(node, (SampleList, FieldList, FieldTuple)) or hasattr(node, "_fields") or not _can_hold_rows(node[0]):
        return False
    if len(set(map(_kind, node))) > 1:
        return False
    return not isinstance(node[0], Mapping) or bool(set(node[0]).intersection(*node))


def _kind(item: Any) -> tuple[object, ...]:  # noqa: ANN401 (whatever a list holds)
    """Return what samples in a list have in common: type and number of axes, those of the first item, of a sequence."""
    if isinstance(item, (list, tuple)):
        return (type(item), *map(_kind, item[:1]))
    return type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)


def _is_short(batch: Batch) -> bool:
    """Whether a batch is a list of so few tensors that they are fields, as torch's default collate returns them."""
    return isinstance(batch, list) and len(batch) <= _MAX_PLAIN_FIELDS and all(map(_is_tensor, batch))


def _entries(node: Batch, number: int, *, is_top: bool = True) -> frozenset[int] | None:
    """Return the ids of the lists that have an entry for each of so many samples; None if not all leaves have as many.

    Raises:
        DataError: a list fits as fields and as samples.
    """
    if not _is_container(node) or _is_cut_whole(node):
        return frozenset() if not _carries_samples(node) or _length(node) == number else None
    below: frozenset[int] | None = frozenset()
    for _, child in _children(node):
        found = _entries(child, number, is_top=False)
        if found is None:
            below = None
            break
        below |= found
    if not _may_be_samples(node, is_top=is_top):
        return below
    holds_samples = any(_carries_samples(leaf) for _, leaf in _leaves(node, "", cutting=True))
    if not holds_samples and isinstance(node, tuple):  # such as sizes of images
        return below
    if len(node) != number:
        return below if holds_samples else None
    if holds_samples and below is not None:
        raise DataError(_in_two_ways(f"a {type(node).__name__} in the batch", {number: frozenset()}, both=number))
    return frozenset([id(node)])


def _in_two_ways(what: str, readings: Mapping[int, frozenset[int]], *, both: int | None = None) -> str:
    ways = [
        f"{number} samples, one for each entry of a list"
        if entries
        else f"{number} samples, along the first axis of every tensor"
        for number, entries in readings.items()
    ]
    if both is not None:
        ways.append(f"{both} samples, one for each entry of a list")
    return (
        f"{what} can be read in two ways: {', or '.join(ways[:2])}. Pass fields as a dict, and samples as "
        "anybatch.data.SampleList(samples), which is cut by its entries."
    )


def _uncountable(batch: Batch, lengths: Mapping[str, int]) -> str:
    own = "or give the batch a class of its own, with __len__, slice_samples(start, stop) and to(device)"
    if not lengths:
        return (
            f"the batch ({type(batch).__name__}) holds no tensor with a first axis, so its samples cannot be counted. "
            f"Return tensors whose first axis is the sample from the collate function, {own}."
        )
    (first_path, first), *rest = lengths.items()
    path, length = next((path, length) for path, length in rest if length != first)
    return (
        f"leaves of the batch have different lengths: {first_path} has {first} samples, {path} has {length}. "
        "Every leaf must have the sample as its first axis; move anything else out of the batch "
        f"or make it a plain number, {own} (for labelled and unlabelled samples side by side, say)."
    )


def _plain_fields(batch: Batch) -> Sequence[torch.Tensor]:
    """Return the fields of a dict, tuple or short list of dense tensors, as most batches are; nothing for any other.

    A step asks three times, and going through a tree in general takes ten times as long.
    """
    kind = type(batch)
    is_plain = kind is tuple or (kind is list and len(batch) <= _MAX_PLAIN_FIELDS)
    fields = tuple(batch.values()) if kind is dict else batch if is_plain else ()
    for leaf in fields:
        # Of subclasses of tensors nothing is known.
        if type(leaf) is not torch.Tensor or not leaf.dim() or leaf.layout is not torch.strided or leaf.is_nested:
            return ()
    return fields


def _is_cut_whole(node: object) -> bool:
    """Whether something is cut as one, whatever it consists of: it knows how, or has one entry for each sample."""
    if type(node) is dict:
        return False
    return isinstance(node, SampleList) or hasattr(node, "slice_samples")


def _is_container(node: object) -> bool:
    # What most batches consist of goes first: asking for a Mapping takes longer than all else here.
    if isinstance(node, torch.Tensor):
        return False
    if isinstance(node, dict):
        return True
    if _are_strings(node):
        return False
    if isinstance(node, (tuple, Mapping)) or (dataclasses.is_dataclass(node) and not isinstance(node, type)):
        return True
    # A list of numbers or strings is a leaf, with one entry per sample.
    return isinstance(node, list) and any(map(_can_hold_rows, node))


def _can_hold_rows(item: object) -> bool:
    return _is_tensor(item) or hasattr(item, "slice_samples") or _is_container(item)


def _is_tensor(item: object) -> bool:
    """Whether this is a tensor, or a numpy array, recognised without numpy, which need not be installed."""
    return isinstance(item, torch.Tensor) or (hasattr(item, "__array__") and getattr(item, "ndim", 0) > 0)


def _are_strings(node: object) -> bool:
    """Whether this is one string per sample, as torch's default collate hands them on (a named tuple is none)."""
    if not isinstance(node, tuple) or hasattr(node, "_fields"):
        return False
    return bool(node) and all(isinstance(item, (str, bytes)) for item in node)


def _children(node: Batch) -> Iterator[tuple[str, Any]]:
    if isinstance(node, (dict, Mapping)):
        return ((f"[{key!r}]", value) for key, value in node.items())
    if dataclasses.is_dataclass(node):
        return ((f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node))
    return ((f"[{index}]", value) for index, value in enumerate(node))


def _leaves(node: Batch, path: str, *, cutting: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield what a batch consists of; what is cut as one is not looked into where `cutting`."""
    if not _is_container(node) or (cutting and _is_cut_whole(node)):
        yield path, node
        return
    for key, child in _children(node):
        yield from _leaves(child, path + key, cutting=cutting)


def _map_leaves(node: Batch, function: Callable[[Any], Any], *, cutting: bool = False) -> Batch:
    """Return the same structure around what `function` makes of leaves."""
    if isinstance(node, torch.Tensor) or not _is_container(node) or (cutting and _is_cut_whole(node)):
        return function(node)
    return _with_children(node, lambda child: _map_leaves(child, function, cutting=cutting))


def _with_children(node: Batch, function: Callable[[Any], Any]) -> Batch:
    """Return a container of the same kind around what `function` makes of its children; anything else as it is."""
    if isinstance(node, torch.Tensor) or not _is_container(node):
        return node
    if isinstance(node, (dict, Mapping)):
        return _rebuild_mapping(node, {key: function(value) for key, value in node.items()})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields that `__init__` does not take; the class computes these from the others.
        fields = {f.name: function(getattr(node, f.name)) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(node, **fields)
    items = [function(item) for item in node]
    # A named tuple takes its items one by one, any other tuple takes all of them together.
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*items)
    return type(node)(items)


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Batch:
    """Return `values` as the mapping type of `node` where that type can be built from a dict, else as a dict."""
    if type(node) is dict:
        return values
    try:
        return type(node)(values)  # type: ignore[call-arg]
    except TypeError:  # such as defaultdict, whose first argument is its factory
        return values


def _carries_samples(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() > 0
    return isinstance(leaf, list) or _are_strings(leaf) or hasattr(leaf, "slice_samples") or _is_tensor(leaf)


def _length(leaf: Any) -> int:  # noqa: ANN401 (a tensor, list or array)
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0)  # the older of the two layouts of nested tensors has no shape
    return len(leaf)
