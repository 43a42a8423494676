"""Running a model once more than the user asked for, and leaving no trace of it."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Self

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.data.random_state import preserved_random_state, seed_generators
from anybatch.engine.reached_state import ReachedState
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

    What modules keep in attributes goes back by itself, and so does what the loss and the functions that it calls keep
    in objects, closures, global variables and classes of the user's own, with the contents of lists, dicts and sets and
    the values of tensors. This is for what lies elsewhere: files, prints, iterators, objects of other packages.
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

    So do the variables that functions write to, see `ReachedState`, with the values of tensors and the contents of
    lists, dicts and sets in them. Parameters are taken to be left alone. Warnings are not shown: the step itself runs
    the same code a moment later.

    Args:
        modules: what is run.
        device: where.
        functions: what else is run: functions, methods or callable objects of the user's.
        as_compiled: run compiled modules as they are; otherwise they run as they were written.
    """
    reached = ReachedState(functions, modules)
    buffers = BufferValues(nn.ModuleList(reached.modules))
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
            reached.restore()
            buffers.restore()


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
