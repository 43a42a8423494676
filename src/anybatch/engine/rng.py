"""Random numbers inside a step: keyed per micro-batch or per sample, without effect on the caller's generators."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from types import TracebackType
from typing import Literal, Self

import torch
from torch import nn

from anybatch.engine.accumulate import MicroBatch, Randomness
from anybatch.engine.per_sample_dropout import KeyedGenerators, PerSample, SampleRandomness, device_generators
from anybatch.errors import UserError
from anybatch.parallel.local_parts import local_part

Rng = Literal["micro_batch", "per_sample"] | PerSample | None
_NOTHING = nullcontext()
_NUM_VALUES = 8
"""Values of each parameter that enter a seed."""


def choose_randomness(rng: Rng, modules: nn.Module, device: torch.device) -> Randomness:
    """Return the source of the micro-batches' random numbers.

    Raises:
        UserError: `rng` is unknown, or names a module that does not exist.
        CompositionError: the model draws numbers that cannot be keyed by sample.
    """
    if rng not in ("micro_batch", "per_sample", None) and not isinstance(rng, PerSample):
        message = f"{rng=} must be 'micro_batch', 'per_sample', a PerSample or None."
        raise UserError(message)
    if rng is None:
        return CallersRandomness(device)
    if rng == "micro_batch":
        return UnitRandomness(device)
    return SampleRandomness(rng if isinstance(rng, PerSample) else PerSample(), modules, device)


def advancing_generators(randomness: Randomness) -> list[torch.Generator]:
    """Return the generators that a step advances: none if random numbers are keyed."""
    return randomness.generators if isinstance(randomness, CallersRandomness) else []


def seed_of_state(modules: nn.Module) -> int:
    """Return a seed computed from the state of torch's generator and from weights, without changing them.

    So `torch.manual_seed` has an effect, and two models, such as a generator and a critic, draw different numbers.
    """
    digest = blake2b(bytes(torch.default_generator.get_state().tolist()), digest_size=7)
    for name, parameter in modules.named_parameters():
        values = local_part(parameter).detach().reshape(-1)[:_NUM_VALUES].tolist()
        digest.update(repr((name, tuple(parameter.shape), values)).encode())
    return int.from_bytes(digest.digest())


class UnitRandomness(KeyedGenerators):
    """Seeds torch's generators per micro-batch, and restores the caller's state at the end.

    Only torch's default generators (CPU and the rank's device) are keyed, so a model that draws from Python or numpy is
    not reproducible.
    """

    covers_backward = False

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:
        """Seed the random numbers of one micro-batch."""
        # `torch.manual_seed` is a hundred times slower: it visits every kind of device, and keeps a traceback for each
        # that is not initialised.
        for generator in self.generators:
            generator.manual_seed(micro_batch.seed)
        return _NOTHING

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Restore the generators on exit, so that draws of another micro-batch have no effect on this one."""
        states = [generator.get_state() for generator in self.generators]
        try:
            yield
        finally:
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)


class CallersRandomness:
    """Leaves random numbers alone, for `rng=None`."""

    covers_backward = False

    def __init__(self, device: torch.device) -> None:
        self.generators = [torch.default_generator, *device_generators(device)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def micro_batch(self, micro_batch: MicroBatch) -> AbstractContextManager[object]:  # noqa: ARG002 (the protocol's)
        """Return an empty context."""
        return _NOTHING

    def whole(self, seed: int) -> None:
        """Do nothing."""

    def parked(self) -> AbstractContextManager[None]:
        """Return an empty context: other micro-batches draw from the same generators."""
        return nullcontext()
