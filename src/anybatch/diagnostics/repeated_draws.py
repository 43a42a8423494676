"""Random numbers that are the same in the un-split batch and in its micro-batches."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn

from anybatch.core.loss import Loss
from anybatch.core.loss_kinds import AcrossSamples, LossFunction
from anybatch.core.tree import Batch
from anybatch.data.random_state import host_random_digest, seed_generators
from anybatch.engine.loss_check.held import HeldDraws


class RepeatedDraws:
    """Repeats random numbers in every forward: torch's for each sample, Python's and numpy's from a seed.

    Args:
        constant: torch draws one number everywhere, see `HeldDraws`.
        continues: Python and numpy continue from one forward to the next. Numbers that are drawn once for each sample,
            in order, are then the same in one batch and in several.

    Attributes:
        seed: seed of Python and numpy, set by the run.
        by_host: whether a forward has drawn from Python or numpy.
    """

    def __init__(self, *, constant: bool = False, continues: bool = False) -> None:
        self.seed = 0
        self.by_host = False
        self._torch = HeldDraws(constant=constant)
        self._continues = continues
        self._initial_state: tuple[int, ...] = ()
        self._final_states: dict[tuple[str, int], set[tuple[int, ...]]] = {}

    @property
    def differ_by_sample(self) -> bool:
        """Whether forwards of different numbers of samples drew differently often from Python or numpy."""
        return any(len(states) > 1 for states in self._final_states.values())

    @property
    def unknown(self) -> set[str]:
        """Names of torch's random operations that cannot be repeated."""
        return self._torch.unknown

    def held(self, seed: int) -> AbstractContextManager[object]:
        """Return a context in which torch's numbers are held."""
        self.seed = seed
        self._torch.restart()
        return self._torch

    def call(self, name: str, function: LossFunction, model: Any, batch: Batch) -> Any:  # noqa: ANN401 (as the user's)
        """Call a function of the user from the first random number on.

        Args:
            name: of the function; each draws for itself.
            function: the loss function or the encoder.
            model: its first argument.
            batch: its second.
        """
        self._restart()
        output = function(model, batch)
        self._record(name)
        return output

    @contextmanager
    def applied_to(self, loss: Loss) -> Iterator[Loss]:
        """Yield the loss, each call of which draws the same numbers."""
        handles: list[Any] = []

        def repeated(name: str, function: LossFunction) -> LossFunction:
            if isinstance(function, nn.Module):  # its parameters train, so it stays a module; it is a copy
                handles.append(function.register_forward_pre_hook(lambda *_: self._restart()))
                handles.append(function.register_forward_hook(lambda *_: self._record(name)))
                return function
            return lambda model, batch: self.call(name, function, model, batch)

        changed = dataclasses.replace(loss, function=repeated("function", loss.function))
        if isinstance(loss.kind, AcrossSamples):
            kind = dataclasses.replace(loss.kind, encode=repeated("encode", loss.kind.encode))
            changed = dataclasses.replace(changed, kind=kind)
        try:
            yield changed
        finally:
            for handle in handles:
                handle.remove()

    def _restart(self) -> None:
        self._torch.restart()
        if not self._continues:
            seed_generators(self.seed)
        self._initial_state = host_random_digest()

    def _record(self, name: str) -> None:
        final_state = host_random_digest()
        self.by_host = self.by_host or final_state != self._initial_state
        self._final_states.setdefault((name, self.seed), set()).add(final_state)


def ways_of_drawing(*, by_host: bool) -> Iterator[Callable[[], RepeatedDraws]]:
    """Yield functions that make draws, in the order in which they are tried.

    Samples may be on another axis than the first, or draw in a loop: one number everywhere suits these.

    Args:
        by_host: whether Python or numpy draws.
    """
    for continues in (False, True) if by_host else (False,):
        for constant in (False, True):
            yield partial(RepeatedDraws, constant=constant, continues=continues)
