"""Random numbers inside a step: keyed per micro-batch, and the caller's own are as before."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch


class UnitRandomness:
    """Seeds torch's generators per micro-batch, and puts the caller's state back at the end.

    Only torch's own generators (CPU and the rank's device) are keyed: a model that draws from Python or numpy is not
    reproducible here.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator, *_device_generators(device)]
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> Self:
        self._states = [generator.get_state() for generator in self._generators]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Start the random numbers of one micro-batch. `torch.manual_seed` would be a hundred times slower."""
        for generator in self._generators:
            generator.manual_seed(seed)

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Let others draw for a while; afterwards the numbers go on as if nobody had."""
        states = [generator.get_state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)


class CallersRandomness:
    """Leaves random numbers as they come, which is `rng=None`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def seed(self, seed: int) -> None:
        """Nothing is seeded."""

    def parked(self) -> AbstractContextManager[None]:
        """Others draw from the same numbers."""
        return nullcontext()


def _device_generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return []
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", None)
    return [generators[device.index or 0]] if generators else []
