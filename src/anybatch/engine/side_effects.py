"""Running a model once more than the user asked for, and leaving no trace of it."""

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
from anybatch.engine.rng.generators import UnitRandomness

_IS_TRIAL: ContextVar[bool] = ContextVar("anybatch_is_trial", default=False)


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

    Buffers of modules and the global random generators are restored after a trial run. Nothing else is: attributes,
    lists, counters and files keep the changes of a trial run, since other threads and signal handlers may change them
    in the meantime.
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
    """Restore buffers and random generators at the end, also after an error. Python objects are not restored.

    Parameters are expected not to change. Warnings are not shown: the step itself runs the same code a moment later.

    Args:
        modules: the modules that run.
        device: their device.
        functions: functions of the user's, whose buffers are restored too, see `modules_of`.
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
