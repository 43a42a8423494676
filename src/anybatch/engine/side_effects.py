"""Running a model once more than the user asked for, and leaving no trace of it."""

import functools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import chain
from types import ModuleType
from typing import Any, Self

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.engine.rng.generators import UnitRandomness

_IS_TRIAL: ContextVar[bool] = ContextVar("anybatch_is_trial", default=False)
_DEEPEST = 2
"""How many containers deep their contents go back: `self.seen["train"].append(...)` has two."""
_PARTS = ("_parameters", "_buffers", "_modules")

Restore = Callable[[], None]


def in_trial_run() -> bool:
    """Whether the model or the loss is run by anybatch beside the step, or a second time: what counts runs leaves it.

    True while the declaration of the loss is checked, while micro-batch sizes are tried, in the second pass of
    `ab.joint`, and in `ab.check`. False in the one forward of each micro-batch whose gradient is used, and in
    evaluations. A step that is begun again after running out of memory is a step again: False in both tries.

    ```python
    def loss(model, batch):
        logits = model(batch["x"])
        if not ab.in_trial_run():
            accuracy.update(logits, batch["y"])
        return F.cross_entropy(logits, batch["y"])
    ```

    What modules and the loss's own object keep in attributes, lists, dicts and sets goes back by itself; this is for
    what is kept elsewhere: global variables, closures, files, counters of other libraries.
    """
    return _IS_TRIAL.get()


@contextmanager
def trial_run() -> Iterator[None]:
    """Let `in_trial_run` be true meanwhile."""
    token = _IS_TRIAL.set(True)
    try:
        yield
    finally:
        _IS_TRIAL.reset(token)


@contextmanager
def without_side_effects(
    modules: nn.Module, device: torch.device, *, functions: Iterable[object] = (), as_compiled: bool = False
) -> Iterator["SeededGenerators"]:
    """Put buffers, hooks, attributes, modes and random numbers back as they were, also behind an error.

    Attributes go back with the values of tensors and the contents of lists, dicts and sets in them, of modules and of
    the objects that functions belong to. Parameters are taken to be left alone. Warnings are not shown: the step itself
    runs the same code a moment later.

    Args:
        modules: what is run.
        device: where.
        functions: what else is run: functions, methods or callable objects of the user's.
        as_compiled: run compiled modules as they are; otherwise they run as they were written.
    """
    owners = list(_owners(functions))
    own = set(modules.modules())
    others = [one for owner in owners for one in _values(owner) if isinstance(one, nn.Module) and one not in own]
    everything = list(dict.fromkeys(chain.from_iterable(one.modules() for one in [modules, *others])))
    # Counters and caches that users keep as plain attributes (steps seen, a last output) go back as well.
    restores = [*map(_module_attributes, everything), *map(_attributes, owners)]
    buffers = [BufferValues(one) for one in [modules, *others]]
    generators = SeededGenerators(device)
    with ExitStack() as stack:
        stack.enter_context(trial_run())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if (
            not as_compiled and "torch._dynamo" in sys.modules
        ):  # nothing is compiled without it, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(generators)
        try:
            yield generators
        finally:
            for restore in (*restores, *(one.restore for one in buffers)):
                restore()


def _owners(functions: Iterable[object]) -> Iterator[object]:
    """Yield what functions may keep things in: a callable object, a method's own, and what a partial was made of."""
    for function in functions:
        if isinstance(function, functools.partial):
            yield from _owners([function.func])
        elif not isinstance(function, nn.Module):
            found = (function, getattr(function, "__self__", None))
            # A function of C belongs to its file.
            yield from (one for one in found if hasattr(one, "__dict__") and not isinstance(one, ModuleType))
            if hasattr(function, "__wrapped__"):  # what `functools.wraps` leaves
                yield from _owners([function.__wrapped__])


def _values(owner: object) -> Iterator[object]:
    yield owner
    yield from vars(owner).values()


def _module_attributes(module: nn.Module) -> Restore:
    kind, restore = type(module), _attributes(module)

    def restore_unless_materialised() -> None:
        if type(module) is kind:  # otherwise a lazy module has found its shape, and keeps it
            restore()

    return restore_unless_materialised


def _attributes(owner: object) -> Restore:
    """Return what puts the attributes of an object back, with what they hold."""
    before = dict(vars(owner))
    # Parameters are many and left alone; buffers are put back by themselves. That some were added is undone.
    contents = [_contents(value, _DEEPEST - 2 * (name in _PARTS)) for name, value in before.items()]

    def restore() -> None:
        now = vars(owner)
        if isinstance(now, MutableMapping):
            _fill(now, before)
        for one in contents:
            one()

    return restore


def _contents(value: object, depth: int) -> Restore:
    """Return what puts the values of a tensor, or what a container holds, back."""
    if isinstance(value, torch.Tensor):
        return _tensor(value) if depth else _nothing
    if not isinstance(value, (list, dict, set, deque)):
        return _nothing
    kept = value.copy()
    inner = [_contents(one, depth - 1) for one in (kept.values() if isinstance(kept, dict) else kept)] if depth else []

    def restore() -> None:
        if isinstance(value, dict):
            _fill(value, kept)
        elif isinstance(value, set):
            value.intersection_update(kept)
            value.update(kept)
        elif len(value) != len(kept) or any(map(_is_other, value, kept)):
            value.clear()
            value.extend(kept)
        for one in inner:
            one()

    return restore


def _fill(now: MutableMapping[Any, Any], before: Any) -> None:  # noqa: ANN401 (a mapping of the same kind)
    """Put back what a mapping held, in its order; one that is as it was is not touched."""
    if list(now) == list(before) and not any(map(_is_other, now.values(), before.values())):
        return
    for name in list(now):
        del now[name]
    now.update(before)


def _is_other(one: object, other: object) -> bool:
    return one is not other


def _tensor(tensor: torch.Tensor) -> Restore:
    if isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
        return _nothing
    value = tensor.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        # One that is as it was is not written to: a graph of the user's may have saved it.
        if tensor.shape == value.shape and not torch.equal(tensor, value):
            tensor.copy_(value)

    return restore


def _nothing() -> None:
    """Put nothing back."""


class SeededGenerators:
    """All generators that a model or a loss may draw from: seeded at will, as before at the end."""

    def __init__(self, device: torch.device) -> None:
        self._torch = UnitRandomness(device)
        self._stack = ExitStack()

    def seed(self, seed: int) -> None:
        """Start all random numbers."""
        seed_generators(seed)
        self._torch.whole(seed)  # on the device, too

    def __enter__(self) -> Self:
        self._stack.enter_context(preserved_random_state())
        self._stack.enter_context(self._torch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
