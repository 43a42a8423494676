"""Snapshots of what the user's objects hold: attributes, variables, contents of containers, values of tensors."""

import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, MutableMapping
from types import CellType, MemberDescriptorType
from typing import Any

import torch
from torch import nn

_DEEPEST = 2
"""How many containers deep their contents go back: `self.seen["train"].append(...)` has two."""
_MOST_BYTES = 64 * 2**20
"""What is kept outside of modules may be a whole data set: what is more than this in all is taken to be only read."""
_MOST_ENTRIES = 1000
"""A longer list is one of data: what is in it goes back, not what its entries hold."""
_PARTS = ("_parameters", "_buffers", "_modules")
_MISSING = object()

Restore = Callable[[], None]


class Snapshot:
    """What some objects and variables hold, as it was when each was added."""

    def __init__(self) -> None:
        self._restores: list[Restore] = []
        # Kept themselves, so that no other object gets the number of one that is gone.
        self._values: dict[int, object] = {}
        self._bytes_left = _MOST_BYTES

    def add_attributes(self, owner: object) -> None:
        """Add the attributes of an object; those of a lazy module stay once it has found its shape."""
        kind, before, in_slots = type(owner), dict(getattr(owner, "__dict__", {})), _slots(owner)
        is_module = isinstance(owner, nn.Module)
        num_others = len(self._restores)
        for name, value in (before | in_slots).items():
            # Parameters are many and left alone; buffers are put back by themselves. That some were added is undone.
            self._add_contents(value, _DEEPEST - 2 * (is_module and name in _PARTS), is_limited=not is_module)

        inside, self._restores[num_others:] = self._restores[num_others:], []

        def restore() -> None:
            if type(owner) is not kind:
                return
            now = getattr(owner, "__dict__", None)
            if isinstance(now, MutableMapping):
                _fill(now, before)
            for name, value in in_slots.items():
                if getattr(owner, name, _MISSING) is not value:
                    object.__setattr__(owner, name, value)  # a frozen dataclass has a `__setattr__` that refuses
            for one in inside:
                one()

        self._restores.append(restore)

    def add_variables(self, names: Iterable[str], space: MutableMapping[str, Any]) -> None:
        """Add global variables of a module; one that is new is taken out again."""
        before = {name: space.get(name, _MISSING) for name in names}
        self._add_contents(before, _DEEPEST + 1)

        def restore() -> None:
            for name, value in before.items():
                if value is _MISSING:
                    space.pop(name, None)
                elif space.get(name, _MISSING) is not value:
                    space[name] = value

        self._restores.append(restore)

    def add_cell(self, cell: CellType) -> None:
        """Add a variable that a function closes over."""
        before = cell_value(cell)
        self._add_contents(before, _DEEPEST)

        def restore() -> None:
            if cell_value(cell) is not before:
                if before is _MISSING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = before

        self._restores.append(restore)

    def add_class_attributes(self, kind: type, names: Iterable[str]) -> None:
        """Add attributes of a class itself."""
        before = {name: vars(kind)[name] for name in names}
        self._add_contents(before, _DEEPEST + 1)

        def restore() -> None:
            for name, value in before.items():
                if vars(kind).get(name, _MISSING) is not value:
                    setattr(kind, name, value)

        self._restores.append(restore)

    def restore(self) -> None:
        """Put back what has changed, and touch nothing else."""
        for restore in self._restores:
            restore()

    def _add_contents(self, value: object, depth: int, *, is_limited: bool = True) -> None:
        """Add the values of a tensor or array, or what a container holds."""
        numpy = sys.modules.get("numpy")  # only torch is needed
        if isinstance(value, torch.Tensor):
            if depth and _may_be_state(value):
                self._add_values(value, value.numel() * value.element_size(), is_limited=is_limited)
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if depth and value.flags.writeable:
                self._add_values(value, value.nbytes, is_limited=is_limited)
        elif isinstance(value, (list, dict, set, deque)):
            kept = dict(_items(value)) if isinstance(value, dict) else value.copy()
            self._restores.append(lambda: _refill(value, kept))
            if depth and len(kept) <= _MOST_ENTRIES:
                for one in list(kept.values() if isinstance(kept, dict) else kept):
                    self._add_contents(one, depth - 1, is_limited=is_limited)

    def _add_values(self, value: Any, num_bytes: int, *, is_limited: bool) -> None:  # noqa: ANN401 (numpy may be absent)
        if id(value) in self._values or (is_limited and num_bytes > self._bytes_left):
            return
        self._values[id(value)] = value
        self._bytes_left -= num_bytes * is_limited
        self._restores.append(_tensor(value) if isinstance(value, torch.Tensor) else _array(value))


def attributes_of(owner: object) -> dict[str, Any]:
    """Return the attributes of an object, in its dictionary or in slots."""
    return getattr(owner, "__dict__", {}) | _slots(owner)


def _slots(owner: object) -> dict[str, Any]:
    names = {
        name
        for kind in type(owner).__mro__
        if "__slots__" in vars(kind)  # types of C have descriptors of that kind for other things
        for name, value in vars(kind).items()
        if isinstance(value, MemberDescriptorType) and name not in ("__dict__", "__weakref__")
    }
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def cell_value(cell: CellType) -> object:
    """Return what a cell of a closure holds; an object of its own where that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _may_be_state(tensor: torch.Tensor) -> bool:
    return not (isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference())


def _refill(value: Any, kept: Any) -> None:  # noqa: ANN401 (a container of any kind)
    """Put back what a container held; one that is as it was is not touched."""
    if isinstance(value, dict):
        _fill(value, kept)
    elif isinstance(value, set):
        value.intersection_update(kept)
        value.update(kept)
    elif len(value) != len(kept) or any(map(_is_other, value, kept)):
        value.clear()
        value.extend(kept)


def _fill(now: MutableMapping[Any, Any], before: Any) -> None:  # noqa: ANN401 (a mapping of the same kind)
    """Put back what a mapping held, in its order; one that is as it was is not touched."""
    there = _items(now)
    if [name for name, _ in there] == list(before) and not any(value is not before[name] for name, value in there):
        return
    kind = _kind(now)
    for name, _ in there:
        kind.__delitem__(now, name)
    for name, value in before.items():
        kind.__setitem__(now, name, value)


def _items(mapping: MutableMapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return what a mapping holds, not what it makes of it when it is asked, as transformers' table of activations."""
    return list(_kind(mapping).items(mapping))


def _kind(mapping: Any) -> Any:  # noqa: ANN401 (a class whose methods no class of the user's has replaced)
    if isinstance(mapping, dict):
        return OrderedDict if isinstance(mapping, OrderedDict) else dict
    return type(mapping)


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _tensor(tensor: torch.Tensor) -> Restore:
    value = tensor.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        # One that is as it was is not written to: a graph of the user's may have saved it.
        if tensor.shape == value.shape and not torch.equal(tensor, value):
            tensor.copy_(value)

    return restore


def _array(array: Any) -> Restore:  # noqa: ANN401 (numpy's, which may be absent)
    value = array.copy()

    def restore() -> None:
        if array.shape == value.shape and array.tobytes() != value.tobytes():
            array[...] = value

    return restore
