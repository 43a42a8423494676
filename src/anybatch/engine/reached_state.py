"""What functions of the user's can write to beside their arguments: objects, closures, global variables, classes."""

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from anybatch.engine.restoring import Snapshot, attributes_of, cell_value

_MOST_ENTRIES = 1000
"""A longer list is one of data, in which no functions are looked for; what it holds goes back all the same."""
_MOST_OBJECTS = 10_000
"""Whatever reaches more is a structure of data."""
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(__file__).resolve().parents[1],
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Tensor)
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
_WRAPPERS = (functools.partial, MethodType, staticmethod, classmethod, property)
_PARTS_OF_WRAPPERS = ("func", "args", "keywords", "__func__", "__self__", "fget")


class ReachedState:
    """A snapshot of what some functions of the user's can write to, found by going from function to function.

    Followed are the variables that a function closes over and the global ones that it names, the functions, objects
    and classes that these hold, and the classes of modules, as far as they are the user's own code, not that of an
    installed package. Parameters of modules are not state, nor is what reads data: loading may go on meanwhile.

    Args:
        functions: functions, methods or callable objects; these, and what a method belongs to, of any package.
        modules: what they are called with.

    Attributes:
        modules: all modules that were found, those that they are called with among them; their buffers are not kept.
    """

    def __init__(self, functions: Iterable[object], modules: nn.Module) -> None:
        self.modules: dict[nn.Module, None] = {}
        self._snapshot = Snapshot()
        self._seen: dict[int, object] = {}  # kept, so that no other object gets the number of one that is gone
        self._names: dict[int, set[str]] = {}
        self._pending: list[object] = [modules]
        for function in functions:
            self._start(function)
        while self._pending and len(self._seen) < _MOST_OBJECTS:
            self._visit(self._pending.pop())

    def restore(self) -> None:
        """Put back what has changed since this was made; buffers of modules excepted."""
        self._snapshot.restore()

    def _start(self, function: object) -> None:
        """Take what the user has handed over, whoever wrote it."""
        self._pending.append(function)
        if isinstance(function, functools.partial):
            self._start(function.func)
        wrapped = _wrapped(function)
        if wrapped is not None:
            self._start(wrapped)
        for one in (function, getattr(function, "__self__", None)):
            if hasattr(one, "__dict__") and not isinstance(
                one, (nn.Module, ModuleType, FunctionType, type, *_WRAPPERS)
            ):
                self._object(one)

    def _visit(self, value: object) -> None:
        """Take what can be reached from a value."""
        if id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._all_modules(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (*_CONTAINERS, *_WRAPPERS)):
            self._seen[id(value)] = value
            self._pending += _inside(value)
        elif not isinstance(value, (ModuleType, *_PLAIN)):
            if _is_own(type(value)) and not _reads_data(value):
                self._object(value)
            else:
                self._pending.append(_wrapped(value))

    def _all_modules(self, root: nn.Module) -> None:
        for module in root.modules():
            if id(module) not in self._seen:
                self.modules[module] = None
                self._object(module)

    def _object(self, value: object) -> None:
        self._seen[id(value)] = value
        # Counters and caches that users keep as plain attributes (steps seen, a last output).
        self._snapshot.add_attributes(value)
        self._pending += [type(value), *attributes_of(value).values()]

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if id(one) in self._seen or not _is_own(one):
                continue
            self._seen[id(one)] = one
            self._snapshot.add_class_attributes(
                one, [name for name, value in vars(one).items() if _is_state(name, value)]
            )
            self._pending += vars(one).values()

    def _function(self, function: FunctionType) -> None:
        self._seen[id(function)] = function
        self._pending.append(_wrapped(function))
        if _is_of_a_library(function.__code__.co_filename):
            return
        self._snapshot.add_attributes(function)
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._snapshot.add_cell(cell)
                self._pending.append(cell_value(cell))
        self._pending += [function.__defaults__, function.__kwdefaults__]
        names = set(_names(function.__code__))
        self._variables(names, function.__globals__)
        for name in names:
            module = function.__globals__.get(name)
            if isinstance(module, ModuleType) and not _is_library(module):
                self._variables(names, vars(module))

    def _variables(self, names: set[str], space: dict[str, object]) -> None:
        known = self._names.setdefault(id(space), set())
        self._snapshot.add_variables(names - known, space)
        self._pending += [space.get(name) for name in names - known]
        known |= names


def _wrapped(value: object) -> object:
    """Return what `functools.wraps` and caches leave of what they were made of."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _inside(value: Any) -> Iterable[object]:  # noqa: ANN401 (one of the kinds above)
    """Return what a container holds, unless it is one of data, or what a wrapper is made of."""
    if not isinstance(value, _CONTAINERS):
        return [getattr(value, name, None) for name in _PARTS_OF_WRAPPERS]
    if len(value) > _MOST_ENTRIES:
        return ()
    return list(value.values() if isinstance(value, dict) else value)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of global variables and attributes in a function, and in those that are written within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_own(kind: type) -> bool:
    """Return whether a class is the user's own code."""
    module = sys.modules.get(kind.__module__)
    return module is not None and not _is_library(module)


def _is_library(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    # A module without a file is built in, or is the one that a notebook or a prompt runs.
    return module.__name__ != "__main__" if file is None else _is_of_a_library(file)


@functools.cache
def _is_of_a_library(file: str) -> bool:
    path = Path(file).resolve()
    return (
        file.startswith("<frozen") or not _PACKAGES.isdisjoint(path.parts) or any(map(path.is_relative_to, _LIBRARIES))
    )


def _reads_data(value: object) -> bool:
    """Return whether an object is a data set or the like, which other threads may use at the same time."""
    kinds = (Dataset, DataLoader, Sampler)
    return isinstance(value, kinds) or (hasattr(value, "__getitem__") and hasattr(value, "__len__"))


def _is_state(name: str, value: object) -> bool:
    """Return whether an attribute of a class is something that its code counts or collects in."""
    is_code = callable(value) or hasattr(value, "__get__")
    return not (is_code or (name.startswith("__") and name.endswith("__")))
