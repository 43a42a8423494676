"""Nested batches: count, slice and join their samples. Leaves with samples are sliced along their first axis.

**The rule.** A mapping (dict, `BatchEncoding`), dataclass or named tuple holds fields, and so does a tuple that is the
batch itself. These fields have samples along their first axis: tensors with at least one axis, numpy arrays, plain
lists (of strings, say), tuples of strings (from torch's default collate), and objects with `slice_samples(start, stop)`
and `__len__`. Everything else (numbers, None, strings, scalar tensors) is shared by all samples.

A list of tensors or containers, or a tuple of them inside a batch, has two possible readings: either its entries are
fields, or it has one entry per sample (always true for a `SampleList`). The reading that fits the lengths of all other
leaves is used. If both fit, the batch is refused. One exception: a batch that is a list of at most three tensors of
equal length holds fields, as torch's default collate returns them.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import DataError

Tree = Any
"""Containers and leaves, nested in any way."""


class SampleList(list[Any]):
    """A list with one entry per sample, such as images or recordings of different sizes; slicing selects entries."""

    __slots__ = ()


class FieldList(list[Any]):
    """A list of fields, even if its entries could be samples."""

    __slots__ = ()


class FieldTuple(tuple[Any, ...]):
    """A tuple of fields, even if its entries could be samples."""

    __slots__ = ()


def is_sliced_as_one(node: object) -> bool:
    """Whether an object is sliced as one leaf: with its `slice_samples`, or as a list with one entry per sample."""
    if type(node) is dict:
        return False
    return isinstance(node, SampleList) or hasattr(type(node), "slice_samples")


def is_container(node: object) -> bool:
    """Whether an object contains leaves: a mapping, dataclass, tuple, or a list with items other than plain values."""
    # The most frequent type first: checking for a Mapping takes longer than everything else here.
    if isinstance(node, torch.Tensor):
        return False
    if isinstance(node, dict):
        return True
    if _are_strings(node):
        return False
    if isinstance(node, (tuple, Mapping)) or (dataclasses.is_dataclass(node) and not isinstance(node, type)):
        return True
    # A list of numbers or strings is a leaf, with one entry per sample.
    return isinstance(node, list) and any(map(can_hold_rows, node))


def can_hold_rows(item: object) -> bool:
    """Whether an object may have one row per sample, or be a sample itself: true for all but plain values."""
    return is_tensor(item) or hasattr(type(item), "slice_samples") or is_container(item)


def is_tensor(item: object) -> bool:
    """Whether this is a tensor or a numpy array, without importing numpy."""
    return isinstance(item, torch.Tensor) or (hasattr(type(item), "__array__") and getattr(item, "ndim", 0) > 0)


def _are_strings(node: object) -> bool:
    """Whether an object is an unnamed tuple of strings, one per sample, as torch's default collate returns them."""
    if not isinstance(node, tuple) or hasattr(node, "_fields"):
        return False
    return bool(node) and all(isinstance(item, (str, bytes)) for item in node)


def children_of(node: Tree) -> Iterator[tuple[str, Any]]:
    """Return the entries of a container as pairs (last part of the path, such as "['x']", value)."""
    if isinstance(node, (dict, Mapping)):
        return ((f"[{key!r}]", value) for key, value in node.items())
    if dataclasses.is_dataclass(node):
        return ((f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node))
    return ((f"[{index}]", value) for index, value in enumerate(node))


def leaves_of(node: Tree, path: str, *, keep_sliced: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf; with `keep_sliced`, an object that `is_sliced_as_one` is a leaf."""
    if not is_container(node) or (keep_sliced and is_sliced_as_one(node)):
        yield path, node
        return
    for key, child in children_of(node):
        yield from leaves_of(child, path + key, keep_sliced=keep_sliced)


def map_tree(node: Tree, function: Callable[[Any], Any], *, keep_sliced: bool = False) -> Tree:
    """Return the same structure with `function` applied to its leaves; `keep_sliced` as for `leaves_of`."""
    if isinstance(node, torch.Tensor) or not is_container(node) or (keep_sliced and is_sliced_as_one(node)):
        return function(node)
    return with_children(node, lambda child: map_tree(child, function, keep_sliced=keep_sliced))


def with_children(node: Tree, function: Callable[[Any], Any]) -> Tree:
    """Return a container of the same kind with `function` applied to its children; return anything else unchanged."""
    if isinstance(node, torch.Tensor) or not is_container(node):
        return node
    if isinstance(node, (dict, Mapping)):
        return _rebuild_mapping(node, {key: function(value) for key, value in node.items()})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields with init=False; the class computes them from the other fields.
        fields = {f.name: function(getattr(node, f.name)) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(node, **fields)
    items = [function(item) for item in node]
    # A named tuple takes its items as separate arguments, any other tuple takes one iterable.
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*items)
    return type(node)(items)


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Tree:
    """Return `values` as a mapping of the type of `node`; as a dict if that type cannot be built from a dict."""
    if type(node) is dict:
        return values
    try:
        return type(node)(values)  # type: ignore[call-arg]
    except TypeError:  # such as defaultdict, whose first argument is its factory
        return node | values if isinstance(node, dict) else values


def carries_samples(leaf: object) -> bool:
    """Whether the first axis of a leaf is the sample axis; a leaf without a sample axis is shared by all samples."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() > 0
    return isinstance(leaf, list) or _are_strings(leaf) or hasattr(type(leaf), "slice_samples") or is_tensor(leaf)


def length_of(leaf: Any) -> int:  # noqa: ANN401 (a tensor, list or array)
    """Return the length of a leaf's first axis."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0)  # the older of the two layouts of nested tensors has no shape
    return len(leaf)


Batch = Any
"""Any nested batch; its type depends on the user's collate function."""
_MAX_PLAIN_FIELDS = 3
"""Maximum number of tensors in a list that are assumed to be fields; more tensors are likely samples."""


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a nested batch by the rule above; raise a `DataError` if it is not unique."""
    return mark_and_count(batch)[1]


def mark_and_count(batch: Batch, num_samples: int | None = None) -> tuple[Batch, int]:
    """Return a batch with its lists marked as samples or fields (`SampleList`, `FieldList`), and its sample count.

    Slices of a marked batch keep the same reading. Lists whose entries cannot be samples are not marked. If
    `num_samples` is given, the reading with this number of samples is used.
    """
    heights = set(map(len, _plain_fields(batch)))
    if len(heights) == 1 and (num_samples is None or num_samples in heights):
        return batch, heights.pop()
    leaves = leaves_of(batch, "batch", keep_sliced=True)
    lengths = {path: length_of(leaf) for path, leaf in leaves if carries_samples(leaf)}
    lists = dict(_unmarked_lists(batch, "batch"))
    numbers = set(lengths.values())
    if num_samples is None and len(numbers) == 1 and _is_short(batch):
        return batch, numbers.pop()
    numbers |= {len(node) for node in lists.values()}
    if num_samples in numbers:
        numbers = {num_samples}
    readings = {number: entries for number in sorted(numbers) if (entries := _entries(batch, number)) is not None}
    if not readings:
        raise DataError(
            _uncountable(batch, lengths | {path: len(node) for path, node in lists.items()}), code="uncountable"
        )
    if len(readings) > 1:
        raise DataError(_ambiguity("a list in the batch", readings), code="two_readings")
    number, entries = readings.popitem()
    return (_with_marks(batch, entries) if lists else batch), number


def as_fields(batch: Batch) -> Batch:
    """Return a batch of torch's default collate with all of its lists marked as fields."""
    has_lists = not _plain_fields(batch) and any(True for _ in _unmarked_lists(batch, ""))
    return _with_marks(batch, frozenset()) if has_lists else batch


def slice_samples(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples `start` to `stop` (exclusive) of a nested batch; tensors are views, not copies."""
    return slice_marked(_marked(batch), start, stop)


def slice_marked(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples `start` to `stop` (exclusive) of a batch whose lists `mark_and_count` has marked."""
    if fields := _plain_fields(batch):
        rows = [field[start:stop] for field in fields]
        return dict(zip(batch, rows, strict=True)) if type(batch) is dict else type(batch)(rows)

    def piece(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            if leaf.is_nested or leaf.layout is not torch.strided:
                return _rows_of_other_layouts(leaf, start, stop)
            return leaf[start:stop] if leaf.dim() else leaf
        if hasattr(type(leaf), "slice_samples"):
            return leaf.slice_samples(start, stop)
        if isinstance(leaf, SampleList):
            return SampleList(leaf[start:stop])
        return leaf[start:stop] if carries_samples(leaf) else leaf

    return map_tree(batch, piece, keep_sliced=True)


def _rows_of_other_layouts(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return a copy of rows of a nested or sparse tensor, which torch cannot slice."""
    if tensor.is_nested:
        rows: torch.Tensor = torch.nested.as_nested_tensor(list(tensor.unbind()[start:stop]), layout=tensor.layout)
        return rows
    if tensor.layout is torch.sparse_coo:
        return torch.narrow_copy(tensor, 0, start, stop - start)
    message = (
        f"a tensor of layout {tensor.layout} cannot be split into samples. Convert it with to_sparse_coo() or "
        "to_dense()."
    )
    raise DataError(message, code="layout_without_rows")


def pick_samples(batch: Batch, positions: Sequence[int]) -> Batch:
    """Return the samples of a nested batch at `positions`, in that order; batches of user classes are not supported."""
    if isinstance(positions, range) and positions.step == 1:
        return slice_samples(batch, positions.start, positions.stop)
    return join_samples([slice_samples(batch, position, position + 1) for position in positions])


def join_samples(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches of the same structure along the sample axis: the inverse of `slice_samples`."""
    return batches[0] if len(batches) == 1 else merge_trees(list(map(_marked, batches)), _joined, "batch")


def _joined(path: str, leaves: Sequence[Any]) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
    first = leaves[0]
    if not carries_samples(first):
        other = next((leaf for leaf in leaves if not _are_equal(first, leaf)), first)
        if other is not first:
            message = (
                f"batches of a loader cannot be joined: {path} is {first} in one and {other} in another, but a value "
                "without a sample axis must be equal in all. Leave it out and compute it in the loss function, or "
                "use ab.batches(dataset, effective_batch_size=...), or have the loader yield effective batches."
            )
            raise DataError(message)
        return first
    if isinstance(first, list):
        return type(first)(itertools.chain.from_iterable(leaves))
    if isinstance(first, tuple):
        return tuple(itertools.chain.from_iterable(leaves))
    if isinstance(first, torch.Tensor) and first.is_nested:
        return torch.nested.as_nested_tensor([row for leaf in leaves for row in leaf.unbind()], layout=first.layout)
    if isinstance(first, torch.Tensor) and len({leaf.shape[1:] for leaf in leaves}) == 1:
        return torch.cat(list(leaves))
    shapes = " and ".join(dict.fromkeys(str(tuple(leaf.shape)) for leaf in leaves if hasattr(leaf, "shape")))
    message = (
        f"batches of a loader cannot be joined: {path} is {shapes or f'of type {type(first).__name__}'}. Use "
        "ab.batches(dataset, effective_batch_size=..., collate=...), which pads each micro-batch separately; or pad "
        "all batches to one length, or have the loader yield effective batches."
    )
    raise DataError(message)


def _are_equal(first: Any, other: Any) -> bool:  # noqa: ANN401 (any leaf of a batch)
    if first is other:
        return True
    if isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(first, other)
    try:
        return type(first) is type(other) and bool(first == other)
    except (TypeError, ValueError):  # arrays compare element by element
        return False


def resize_samples(batch: Batch, num_samples: int, resize: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return a batch with `num_samples` samples: `resize` is applied to tensors; items of lists are repeated."""

    def resized(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            return resize(leaf)
        if not carries_samples(leaf):
            return leaf
        numbers = [number % len(leaf) for number in range(num_samples)]
        return type(leaf)(leaf[number] for number in numbers) if isinstance(leaf, (list, tuple)) else leaf[numbers]

    return map_tree(_marked(batch), resized, keep_sliced=True)


def map_tensors(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the same tree with `function` applied to every tensor, depth first; other leaves are unchanged."""
    return map_tree(batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def copied(batch: Batch, clone: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Batch:
    """Return the same tree with every tensor, list and array copied, so that in-place changes do not affect `batch`."""

    def copy_of(leaf: Any) -> Any:  # noqa: ANN401 (a tensor, list, array or anything else)
        if isinstance(leaf, torch.Tensor):
            return clone(leaf)
        return copy.copy(leaf) if isinstance(leaf, list) or hasattr(leaf, "__array__") else leaf

    return map_tree(batch, copy_of)


def merge_trees(trees: Sequence[Batch], merge: Callable[[str, Sequence[Any]], Any], name: str = "") -> Batch:
    """Merge trees of the same structure: each leaf of the result is `merge(path, leaves at this path)`.

    `merge` is called depth first; paths begin with `name`.
    """
    rows = [list(leaves_of(tree, name, keep_sliced=True)) for tree in trees]
    if len({tuple(path for path, _ in row) for row in rows}) > 1:
        shown = [", ".join(path or "one value" for path, _ in row) or "nothing" for row in rows]
        message = (
            f"batches or outputs with different fields cannot be joined: {' and '.join(dict.fromkeys(shown))}. Return "
            "the same fields in all of them."
        )
        raise DataError(message)
    merged = iter([merge(row[0][0], [leaf for _, leaf in row]) for row in zip(*rows, strict=True)])
    return map_tree(trees[0], lambda _: next(merged), keep_sliced=True)


def flatten_batch(batch: Batch) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], Batch]]:
    """Return every tensor of a nested batch, and a function that rebuilds the batch with other tensors."""
    tensors: list[torch.Tensor] = []

    def extract(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        # An empty tensor keeps the type and device of each leaf, but not its memory.
        return tensor.new_zeros((0, *tensor.shape[1:])) if tensor.dim() else tensor.new_zeros(())

    structure = map_tensors(batch, extract)

    def rebuild(others: Iterable[torch.Tensor]) -> Batch:
        remaining = iter(others)
        return map_tensors(structure, lambda _: next(remaining))

    return tensors, rebuild


def tensors_of(batch: Batch) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested batch, depth first."""
    if fields := _plain_fields(batch):
        return iter(fields)
    return (leaf for _, leaf in leaves_of(batch, "batch") if isinstance(leaf, torch.Tensor))


def moved_to(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Return a batch with its tensors on a device; objects with `slice_samples` are moved by their `to(device)`."""

    def moved(leaf: Any) -> Any:  # noqa: ANN401 (a tensor or anything else)
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if hasattr(type(leaf), "slice_samples") and hasattr(leaf, "to") else leaf

    return map_tree(batch, moved)


def _marked(batch: Batch) -> Batch:
    """Return a batch with its lists marked, as `mark_and_count` does."""
    return mark_and_count(batch)[0] if any(True for _ in _unmarked_lists(batch, "")) else batch


def _with_marks(node: Batch, entries: frozenset[int], *, is_top: bool = True) -> Batch:
    """Return a batch with marked lists: as samples if the `id` of the list is in `entries`, otherwise as fields."""
    if id(node) in entries:
        return SampleList(node)
    if is_sliced_as_one(node):
        return node
    marked = with_children(node, lambda child: _with_marks(child, entries, is_top=False))
    if not _may_be_samples(node, is_top=is_top) or (is_top and _is_short(node)):
        return marked
    return FieldTuple(marked) if isinstance(marked, tuple) else FieldList(marked)


def _unmarked_lists(node: Batch, path: str, *, is_top: bool = True) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield path and value of each unmarked list or tuple whose entries may be samples."""
    if not is_container(node) or is_sliced_as_one(node):
        return
    if _may_be_samples(node, is_top=is_top):
        yield path, node
    for key, child in children_of(node):
        yield from _unmarked_lists(child, path + key, is_top=False)


def _may_be_samples(node: Batch, *, is_top: bool) -> bool:
    """Whether an object is an unmarked list or tuple whose entries may be samples: they are all of one kind."""
    if not isinstance(node, (list, tuple)) or not node or (is_top and isinstance(node, tuple)):
        return False
    if isinstance(node, (SampleList, FieldList, FieldTuple)) or hasattr(node, "_fields") or not can_hold_rows(node[0]):
        return False
    if len(set(map(_kind, node))) > 1:
        return False
    return not isinstance(node[0], Mapping) or bool(set(node[0]).intersection(*node))


def _kind(item: Any) -> tuple[object, ...]:  # noqa: ANN401 (any list item)
    """Return the type, dtype and number of axes of an item, which are equal for all samples in a list.

    For a list or tuple, return its type and the properties of its first item.
    """
    if isinstance(item, (list, tuple)):
        return (type(item), *map(_kind, item[:1]))
    return type(item), getattr(item, "dtype", None), getattr(item, "ndim", None)


def _is_short(batch: Batch) -> bool:
    """Whether a batch is a list of few tensors, which are fields, as torch's default collate returns them."""
    return isinstance(batch, list) and len(batch) <= _MAX_PLAIN_FIELDS and all(map(is_tensor, batch))


def _entries(node: Batch, number: int, *, is_top: bool = True) -> frozenset[int] | None:
    """Return the `id` of each list that has one entry per sample if the batch has `number` samples.

    Return None if not all leaves have this length, so that the batch cannot have `number` samples.
    """
    if not is_container(node) or is_sliced_as_one(node):
        return frozenset() if not carries_samples(node) or length_of(node) == number else None
    inner: frozenset[int] | None = frozenset()
    for _, child in children_of(node):
        entries = _entries(child, number, is_top=False)
        inner = None if inner is None or entries is None else inner | entries
        if inner is None:
            break
    if not _may_be_samples(node, is_top=is_top):
        return inner
    holds_samples = any(carries_samples(leaf) for _, leaf in leaves_of(node, "", keep_sliced=True))
    if not holds_samples and isinstance(node, tuple):  # such as sizes of images
        return inner
    if len(node) != number:
        return inner if holds_samples else None
    if holds_samples and inner is not None:
        two = _ambiguity(f"a {type(node).__name__} in the batch", {number: frozenset()}, num_entries=number)
        raise DataError(two, code="two_readings")
    return frozenset([id(node)])


def _ambiguity(what: str, readings: Mapping[int, frozenset[int]], *, num_entries: int | None = None) -> str:
    ways = [
        f"{number} samples, one for each entry of a list"
        if entries
        else f"{number} samples, along the first axis of every tensor"
        for number, entries in readings.items()
    ]
    if num_entries is not None:
        ways.append(f"{num_entries} samples, one for each entry of a list")
    return (
        f"{what} can be read in two ways: {', or '.join(ways[:2])}. If its entries are fields, pass a dict. If they "
        "are samples, collate them with torch.utils.data.default_collate or pass anybatch.data.SampleList(samples)."
    )


def _uncountable(batch: Batch, lengths: Mapping[str, int]) -> str:
    own_class = "or write a class for the batch with __len__, slice_samples(start, stop) and to(device)"
    if not lengths:
        return (
            f"the batch ({type(batch).__name__}) has no tensor with a sample axis, so its samples cannot be counted. "
            f"Return tensors whose first axis is the sample axis from the collate function, {own_class}."
        )
    (first_path, first), *rest = lengths.items()
    path, length = next((path, length) for path, length in rest if length != first)
    return (
        f"leaves of the batch have different lengths: {first_path} has {first} samples, {path} has {length}. "
        "The first axis of every leaf must be the sample axis; move anything else out of the batch "
        f"or make it a plain number, {own_class} (for a batch of labelled and unlabelled samples, say)."
    )


def _plain_fields(batch: Batch) -> Sequence[torch.Tensor]:
    """Return the fields of a dict, tuple or short list of dense tensors; () for any other batch.

    A fast path for most batches: each step calls this three times, and walking a tree takes ten times as long.
    """
    kind = type(batch)
    is_plain = kind is tuple or (kind is list and len(batch) <= _MAX_PLAIN_FIELDS)
    fields = tuple(batch.values()) if kind is dict else batch if is_plain else ()
    for leaf in fields:
        # Tensor subclasses may behave differently.
        if type(leaf) is not torch.Tensor or not leaf.dim() or leaf.layout is not torch.strided or leaf.is_nested:
            return ()
    return fields
