"""Chapter 4: batches of any shape. A batch is a tree; its leaves that carry samples are cut along their first axis.

Containers: mappings (dict, `BatchEncoding` and other `Mapping`s), tuples, named tuples, dataclasses, and lists that
hold a tensor or container. Leaves that carry samples: tensors of at least one axis, numpy arrays, plain lists (a list
of strings, say), and tuples of strings, which torch's default collate makes. Everything else (numbers, None, strings,
zero-axis tensors) belongs to every sample.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from anybatch.errors import DataError

Batch = Any
"""Any nested batch. There is no narrower type: the user's collate function decides."""


def count_samples(batch: Batch) -> int:
    """Return the number of samples of a nested batch: the length of the first axis that all its leaves share.

    Raises:
        DataError: no leaf carries samples, or leaves disagree about how many.
    """
    lengths = {path: _length(leaf) for path, leaf in _leaves(batch, "batch") if _carries_samples(leaf)}
    if not lengths:
        message = (
            f"the batch ({type(batch).__name__}) holds no tensor with a first axis, so its samples cannot be counted. "
            "Return tensors whose first axis is the sample from the collate function."
        )
        raise DataError(message)
    (first_path, first), *rest = lengths.items()
    for path, length in rest:
        if length != first:
            message = (
                f"leaves of the batch have different lengths: {first_path} has {first} samples, {path} has {length}. "
                "Every leaf must have the sample as its first axis; move anything else out of the batch "
                "or make it a plain number."
            )
            raise DataError(message)
    return first


def slice_samples(batch: Batch, start: int, stop: int) -> Batch:
    """Return samples `start` to `stop` (exclusive) of a nested batch; tensors are views, nothing is copied.

    Args:
        batch: any nested batch.
        start: position of the first sample, from 0 on.
        stop: position behind the last sample.
    """
    return _map_leaves(batch, lambda leaf: leaf[start:stop] if _carries_samples(leaf) else leaf)


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

    return _map_leaves(batch, resized)


def map_tensors(batch: Batch, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """Return the same tree with `function` applied to every tensor; all other leaves stay as they are.

    Args:
        batch: any nested batch.
        function: a tensor -> what takes its place; called depth first.
    """
    return _map_leaves(batch, lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf)


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
    return (leaf for _, leaf in _leaves(batch, "batch") if isinstance(leaf, torch.Tensor))


def _is_container(node: object) -> bool:
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
    if isinstance(node, Mapping):
        return ((f"[{key!r}]", value) for key, value in node.items())
    if dataclasses.is_dataclass(node):
        return ((f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node))
    return ((f"[{index}]", value) for index, value in enumerate(node))


def _leaves(node: Batch, path: str) -> Iterator[tuple[str, Any]]:
    if not _is_container(node):
        yield path, node
        return
    for key, child in _children(node):
        yield from _leaves(child, path + key)


def _map_leaves(node: Batch, function: Callable[[Any], Any]) -> Batch:
    if isinstance(node, torch.Tensor) or not _is_container(node):
        return function(node)
    if isinstance(node, Mapping):
        values = {key: _map_leaves(value, function) for key, value in node.items()}
        return _rebuild_mapping(node, values)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields that `__init__` does not take; the class computes these from the others.
        fields = {f.name: _map_leaves(getattr(node, f.name), function) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(node, **fields)
    items = [_map_leaves(item, function) for item in node]
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
    if isinstance(leaf, list) or _are_strings(leaf):
        return True
    # A numpy array, recognised without numpy, which need not be installed.
    return hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0


def _length(leaf: Any) -> int:  # noqa: ANN401 (a tensor, list or array)
    return len(leaf)
