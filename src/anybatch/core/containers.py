"""Chapter 29: the containers and leaves of a batch, and how to rebuild them around other leaves."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Tree = Any
"""Containers and leaves, nested in any way."""


class SampleList(list[Any]):
    """A list with one entry per sample, such as images or recordings of different sizes; it is cut by entries."""

    __slots__ = ()


class FieldList(list[Any]):
    """A list of fields, even if its entries could be samples."""

    __slots__ = ()


class FieldTuple(tuple[Any, ...]):
    """A tuple of fields, even if its entries could be samples."""

    __slots__ = ()


def is_cut_whole(node: object) -> bool:
    """Whether an object is cut as a single leaf: by its own method, or as a list with one entry per sample."""
    if type(node) is dict:
        return False
    return isinstance(node, SampleList) or hasattr(node, "slice_samples")


def is_container(node: object) -> bool:
    """Whether an object holds leaves: a mapping, dataclass or tuple, or a list with more than plain values."""
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
    """Whether an object may have a row per sample, or be a sample: everything but plain values."""
    return is_tensor(item) or hasattr(item, "slice_samples") or is_container(item)


def is_tensor(item: object) -> bool:
    """Whether this is a tensor or a numpy array, without importing numpy."""
    return isinstance(item, torch.Tensor) or (hasattr(item, "__array__") and getattr(item, "ndim", 0) > 0)


def _are_strings(node: object) -> bool:
    """Whether this is one string per sample, as torch's default collate returns them (a named tuple is not)."""
    if not isinstance(node, tuple) or hasattr(node, "_fields"):
        return False
    return bool(node) and all(isinstance(item, (str, bytes)) for item in node)


def children_of(node: Tree) -> Iterator[tuple[str, Any]]:
    """Return the entries of a container, each with the last part of its path."""
    if isinstance(node, (dict, Mapping)):
        return ((f"[{key!r}]", value) for key, value in node.items())
    if dataclasses.is_dataclass(node):
        return ((f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node))
    return ((f"[{index}]", value) for index, value in enumerate(node))


def leaves_of(node: Tree, path: str, *, cutting: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch with their paths; with `cutting`, an object that is cut as one is a leaf."""
    if not is_container(node) or (cutting and is_cut_whole(node)):
        yield path, node
        return
    for key, child in children_of(node):
        yield from leaves_of(child, path + key, cutting=cutting)


def map_tree(node: Tree, function: Callable[[Any], Any], *, cutting: bool = False) -> Tree:
    """Return the same structure with `function` applied to its leaves."""
    if isinstance(node, torch.Tensor) or not is_container(node) or (cutting and is_cut_whole(node)):
        return function(node)
    return with_children(node, lambda child: map_tree(child, function, cutting=cutting))


def with_children(node: Tree, function: Callable[[Any], Any]) -> Tree:
    """Return a container of the same kind with `function` applied to its children; return anything else unchanged."""
    if isinstance(node, torch.Tensor) or not is_container(node):
        return node
    if isinstance(node, (dict, Mapping)):
        return _rebuild_mapping(node, {key: function(value) for key, value in node.items()})
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        # `replace` refuses fields that `__init__` does not take; the class computes these from the others.
        fields = {f.name: function(getattr(node, f.name)) for f in dataclasses.fields(node) if f.init}
        return dataclasses.replace(node, **fields)
    items = [function(item) for item in node]
    # A named tuple takes its items as separate arguments, any other tuple takes one iterable.
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*items)
    return type(node)(items)


def _rebuild_mapping(node: Mapping[Any, Any], values: dict[Any, Any]) -> Tree:
    """Return `values` as the mapping type of `node` where that type can be built from a dict, else as a dict."""
    if type(node) is dict:
        return values
    try:
        return type(node)(values)  # type: ignore[call-arg]
    except TypeError:  # such as defaultdict, whose first argument is its factory
        return values


def carries_samples(leaf: object) -> bool:
    """Whether the first axis of a leaf is the sample axis; other leaves are shared by all samples."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dim() > 0
    return isinstance(leaf, list) or _are_strings(leaf) or hasattr(leaf, "slice_samples") or is_tensor(leaf)


def length_of(leaf: Any) -> int:  # noqa: ANN401 (a tensor, list or array)
    """Return the length of a leaf's first axis."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return leaf.size(0)  # the older of the two layouts of nested tensors has no shape
    return len(leaf)
