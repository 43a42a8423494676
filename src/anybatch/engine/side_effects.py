"""Run a model for a trial, without side effects."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Self

import torch
from torch import nn

from anybatch.core.buffers import BufferKeeper
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.engine.inputs import held_by
from anybatch.engine.rng import UnitRandomness

_IS_TRIAL: ContextVar[bool] = ContextVar("anybatch_is_trial", default=False)


def in_trial_run() -> bool:
    """Whether the model or the loss runs in addition to the regular step, so that code should not count this run.

    True during the check of the loss's declaration, trials of micro-batch sizes, the second pass of `ab.joint`, and
    `ab.check`. False in the forward of each micro-batch whose gradient is used, and in evaluations; also when a step is
    repeated after out of memory, in both tries.

    ```python
    def loss(model, batch):
        logits = model(batch["x"])
        if not ab.in_trial_run():
            accuracy.update(logits, batch["y"])
        return F.cross_entropy(logits, batch["y"])
    ```

    Buffers of modules and the global random generators are restored after a trial run. Attributes, lists, counters and
    files are not, since other threads and signal handlers may change them at the same time.
    """
    return _IS_TRIAL.get()


@contextmanager
def trial_run() -> Iterator[None]:
    """Set `in_trial_run` within the context."""
    token = _IS_TRIAL.set(True)
    try:
        yield
    finally:
        _IS_TRIAL.reset(token)


@contextmanager
def without_side_effects(
    modules: nn.Module, device: torch.device, *, functions: Iterable[object] = (), as_compiled: bool = False
) -> Iterator["SeededGenerators"]:
    """Restore buffers and random generators on exit, also after an error. Python objects are not restored.

    Parameters are expected not to change. Warnings are ignored, since the step runs the same code soon.

    Args:
        modules: the modules that run.
        device: their device.
        functions: user functions, whose buffers are restored too, see `modules_of`.
        as_compiled: run compiled modules compiled; otherwise they run uncompiled.
    """
    buffers = BufferKeeper(nn.ModuleList([modules, *modules_of(functions)]))
    buffers.keep()
    generators = SeededGenerators(device)
    with ExitStack() as stack:
        stack.enter_context(trial_run())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if (
            not as_compiled and "torch._dynamo" in sys.modules
        ):  # nothing is compiled without it, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(generators)
        stack.callback(buffers.restore)
        yield generators


def modules_of(functions: Iterable[object]) -> list[nn.Module]:
    """Return the modules that functions refer to: a teacher in a closure, a global variable, or an attribute.

    Args:
        functions: functions, methods, partial functions or callable objects.
    """
    held = [value for function in functions for value in held_by(function).values()]
    return list(dict.fromkeys(value for value in held if isinstance(value, nn.Module)))


class SeededGenerators:
    """All generators that a model or a loss may use: can be seeded, and are restored on exit."""

    def __init__(self, device: torch.device) -> None:
        self._torch = UnitRandomness(device)
        self._stack = ExitStack()

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        seed_generators(seed)
        self._torch.whole(seed)  # on the device, too

    def __enter__(self) -> Self:
        self._stack.enter_context(preserved_random_state())
        self._stack.enter_context(self._torch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
