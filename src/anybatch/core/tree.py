"""Chapter 4: batches of any shape. A batch is a tree; its leaves that carry samples are cut along their first axis.

Containers: mappings (dict, `BatchEncoding` and other `Mapping`s), tuples, named tuples, dataclasses, and lists that
hold a tensor or container. Leaves that carry samples: tensors of at least one axis, numpy arrays, plain lists (a list
of strings, say), tuples of strings, which torch's default collate makes, lists with a tensor or dict for each sample,
and objects with `slice_samples(start, stop)` and `__len__`. Everything else (numbers, None, strings, zero-axis
tensors) belongs to every sample.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from anybatch.errors import DataError

_MOST_FIELDS_ALIKE = 3
"""Fields of one shape and type in a list: more of them are more likely samples."""
Batch = Any
"""Any nested batch. There is no narrower type: the user's collate function decides."""


class SampleList(list[Any]):
    """A list with one entry for each sample, such as images or recordings of different sizes; it is cut by entries.

    A plain list of tensors in a batch is one too where the rest of the batch leaves no other reading.
    """

    __slots__ = ()


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a nested batch: the length of the first axis that all its leaves share.

    A list of tensors, or of dicts of tensors, is either a list of fields, each with the sample as its first axis, or
    has one entry for each sample. It is what the lengths leave possible. A batch that is an object of a class of its
    own has as many samples as its `__len__` says, if it has `slice_samples(start, stop)` too.

    Raises:
        DataError: no leaf carries samples, leaves disagree about how many, or lists can be read in two ways.
    """
    return read_samples(batch)[1]


def read_samples(batch: Batch) -> tuple[Batch, int]:
    """Return a batch in which every list of samples is a `SampleList`, and its number of samples.

    Raises:
        DataError: see `count_samples`.
    """
    if (fields := _plain_fields(batch)) and len(heights := set(map(len, fields))) == 1:
        return batch, heights.pop()
    lengths = {path: _length(leaf) for path, leaf in _leaves(batch, "batch", cutting=True) if _carries_samples(leaf)}
    numbers, lists = set(lengths.values()), list(_lists_of_tensors(batch))
    # The reading as fields: every leaf has the sample as its first axis.
    if len(numbers) == 1 and not any(map(_looks_like_samples, lists)):
        return batch, numbers.pop()
    tried = numbers | {len(one) for one in lists}
    by_entries = {number: found for number in sorted(tried) if (found := _entries(batch, number))}
    if len(numbers) == 1 and not by_entries:
        return batch, numbers.pop()
    if len(by_entries) == 1 and (len(numbers) > 1 or not numbers or _are_inputs_and_targets(batch)):
        number, found = by_entries.popitem()
        return _map_leaves(batch, lambda leaf: leaf, cutting=True, entries=found), number
    if by_entries:
        raise DataError(_in_two_ways(numbers if len(numbers) == 1 else set(), set(by_entries)))
    raise DataError(_uncountable(batch, lengths))


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
        return dict(zip(batch, rows, strict=True)) if type(batch) is dict else tuple(rows)

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
    """Return a batch in which every list of samples is a `SampleList`; most batches have no list to look at."""
    return read_samples(batch)[0] if any(True for _ in _lists_of_tensors(batch)) else batch


def _lists_of_tensors(node: Batch, *, is_top: bool = True) -> Iterator[Sequence[Any]]:
    """Yield every list or tuple that may have one entry for each sample."""
    if isinstance(node, torch.Tensor) or not _is_container(node) or _is_cut_whole(node):
        return
    if _may_be_samples(node, is_top=is_top) or _are_inputs_and_targets(node):
        yield node
    for _, child in _children(node):
        yield from _lists_of_tensors(child, is_top=False)


def _may_be_samples(node: Batch, *, is_top: bool) -> bool:
    """Whether entries may be samples: they are of one type, and no list of fields is one of them.

    A tuple that is the whole batch holds fields.
    """
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields") or (is_top and isinstance(node, tuple)):
        return False
    return (
        len({type(item) for item in node}) == 1 and not isinstance(node[0], list) and not _are_inputs_and_targets(node)
    )


def _looks_like_samples(node: Sequence[Any]) -> bool:
    """Whether a list whose fields would have equally many samples may have an entry for each sample all the same.

    Two or three tensors, or such that differ in shape or type, are what collate functions return as fields.
    """
    if isinstance(node, tuple):
        return _are_inputs_and_targets(node)
    if _are_inputs_and_targets(node):
        return True
    tensors = [item for item in node if isinstance(item, torch.Tensor)]
    alike = {(item.shape, item.dtype) for item in tensors}
    return len(tensors) == len(node) > _MOST_FIELDS_ALIKE and len(alike) == 1


def _are_inputs_and_targets(node: Batch) -> bool:
    """Whether this is (images, targets), as detection has them: lists of one length, one of them of dicts."""
    if not isinstance(node, (list, tuple)) or hasattr(node, "_fields") or len(node) < 2:  # noqa: PLR2004 (inputs, targets)
        return False
    if not all(isinstance(item, (list, tuple)) and item for item in node) or len({len(item) for item in node}) > 1:
        return False
    return any(all(isinstance(entry, Mapping) for entry in item) for item in node)


def _entries(node: Batch, number: int, *, is_top: bool = True) -> frozenset[int] | None:
    """Return the ids of the lists that have an entry for each of so many samples; None if not all leaves have as many.

    A list is one of fields where it can be, but one of dicts is one of samples where it can be.
    """
    if isinstance(node, torch.Tensor) or not _is_container(node) or _is_cut_whole(node):
        return frozenset() if not _carries_samples(node) or _length(node) == number else None
    may_be = isinstance(node, (list, tuple)) and len(node) == number and _may_be_samples(node, is_top=is_top)
    if may_be and (all(isinstance(item, Mapping) for item in node) or _looks_like_samples(node)):
        return frozenset([id(node)])
    found: set[int] = set()
    for _, child in _children(node):
        below = _entries(child, number, is_top=False)
        if below is None:
            return frozenset([id(node)]) if may_be else None
        found |= below
    return frozenset(found)


def _in_two_ways(fields: set[int], entries: set[int]) -> str:
    ways = [f"{number} samples, as every tensor's first axis says" for number in fields]
    ways += [f"{number} samples, one for each entry of a list" for number in sorted(entries)]
    return (
        f"a list in the batch can be read in two ways: {', or '.join(ways[:2])}. Pass fields as a tuple or dict, and "
        "samples as anybatch.data.SampleList(samples), which is cut by its entries."
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
    """Return the fields of what most batches are, a dict or tuple of dense tensors; nothing for any other.

    A step asks three times, and going through a tree in general takes ten times as long.
    """
    fields = tuple(batch.values()) if type(batch) is dict else batch if type(batch) is tuple else ()
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
    return isinstance(node, list) and any(isinstance(item, torch.Tensor) or _is_container(item) for item in node)


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


def _map_leaves(
    node: Batch, function: Callable[[Any], Any], *, cutting: bool = False, entries: frozenset[int] = frozenset()
) -> Batch:
    """Return the same structure around what `function` makes of leaves; lists with an id in `entries` are marked."""
    if id(node) in entries:
        return SampleList(node)
    if isinstance(node, torch.Tensor) or not _is_container(node) or (cutting and _is_cut_whole(node)):
        return function(node)

    def below(child: Batch) -> Batch:
        return _map_leaves(child, function, cutting=cutting, entries=entries)

    if isinstance(node, (dict, Mapping)):
        return _rebuild_mapping(node, {key: below(value) for key, value in node.items()})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields that `__init__` does not take; the class computes these from the others.
        fields = {f.name: below(getattr(node, f.name)) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(node, **fields)
    items = [below(item) for item in node]
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
    if isinstance(leaf, list) or _are_strings(leaf) or hasattr(leaf, "slice_samples"):
        return True
    # A numpy array, recognised without numpy, which need not be installed.
    return hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0


def _length(leaf: Any) -> int:  # noqa: ANN401 (a tensor, list or array)
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0)  # the older of the two layouts of nested tensors has no shape
    return len(leaf)
