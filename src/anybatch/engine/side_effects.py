"""Running a model once more than the user asked for, and leaving no trace of it."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.engine.rng.generators import UnitRandomness

_PLAIN_TYPES = (bool, int, float, str, type(None), torch.Tensor)


@contextmanager
def without_side_effects(
    modules: nn.Module, device: torch.device, *, as_compiled: bool = False
) -> Iterator["SeededGenerators"]:
    """Put buffers, attributes of modules, modes and random numbers back as they were, also behind an error.

    Warnings are not shown: the step itself runs the same code a moment later. What a module keeps in lists and dicts of
    its own is not put back.

    Args:
        modules: what is run.
        device: where.
        as_compiled: run compiled modules as they are; otherwise they run as they were written.
    """
    buffers = BufferValues(modules)
    # Counters and caches that users keep as plain attributes (steps seen, a last output) go back as well.
    attributes = [(module, type(module), dict(vars(module))) for module in modules.modules()]
    generators = SeededGenerators(device)
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if (
            not as_compiled and "torch._dynamo" in sys.modules
        ):  # nothing is compiled without it, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(generators)
        try:
            yield generators
        finally:
            for module, kind, before in attributes:
                _restore_attributes(module, kind, before)
            buffers.restore()


def _restore_attributes(module: nn.Module, kind: type, before: dict[str, Any]) -> None:
    if type(module) is not kind:  # a lazy module has found its shape, and keeps it
        return
    now = vars(module)
    for name in [name for name in now if name not in before]:
        del now[name]
    for name, value in before.items():
        # A list or dict is the same object before and after, whatever was done to it: plain values alone can go back.
        if isinstance(value, _PLAIN_TYPES) and now.get(name, module) is not value:
            now[name] = value


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
