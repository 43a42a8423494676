"""Seed, compare, save and restore the global random generators of this process."""

import importlib
import importlib.util
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch

from anybatch.errors import CheckpointError

# Augmentations may draw from numpy, so its generator is seeded too (importing it costs nothing: torch has done so).
NUMPY: Final[ModuleType | None] = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
NUMPY_SEEDS: Final = 1 << 32
_TWISTER: Final = "MT19937"  # numpy's default global generator


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the global generators of python, numpy and torch (CPU) when the context ends, even after an error."""
    host, torch_state = HostDraws(), torch.default_generator.get_state()
    try:
        yield
    finally:
        host.restore()
        torch.default_generator.set_state(torch_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU), from which augmentations draw.

    The seed has up to 64 bits; numpy gets the lower 32.
    """
    random.seed(seed)
    if NUMPY is not None:
        NUMPY.random.seed(seed % NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds all devices: 100 times slower


class HostDraws:
    """A snapshot of the global generators of python and numpy, before code that may draw from them."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def keep_if_drawn(self) -> "HostDraws | None":
        """Return this snapshot if a number has been drawn since it was made, else None."""
        return self if host_random_digest() != _digest_of(self._python, self._numpy) else None

    def restore(self) -> None:
        """Set the generators to the state of the snapshot."""
        random.setstate(self._python)
        if NUMPY is not None:
            NUMPY.random.set_state(self._numpy)


def host_random_state() -> dict[str, Any]:
    """Return the state of python's global generator, and of numpy's if installed, as tensors and numbers."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": {"version": version, "words": torch.tensor(words), "gauss": gauss}}
    if NUMPY is not None:
        numpy = _numpy_state()
        if numpy["bit_generator"] != _TWISTER:
            message = (
                f"numpy's global generator is {numpy['bit_generator']}, but checkpoints can store only the state of "
                f"{_TWISTER}. Keep numpy's default generator, and pass yours to the code that uses it."
            )
            raise CheckpointError(message, code="numpy_generator")
        kind, keys, position = _TWISTER, numpy["state"]["key"], numpy["state"]["pos"]
        has_gauss, numpy_gauss = numpy["has_gauss"], numpy["gauss"]
        words = torch.tensor([int(key) for key in keys])
        state["numpy"] = {"kind": kind, "words": words, "place": position, "has_gauss": has_gauss, "gauss": numpy_gauss}
    return state


def restore_host_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators from a result of `host_random_state`; a generator that is not in it is unchanged."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if NUMPY is not None and "numpy" in state:
        saved = state["numpy"]
        words = NUMPY.array(saved["words"].tolist(), dtype=NUMPY.uint32)
        NUMPY.random.set_state((saved["kind"], words, saved["place"], saved["has_gauss"], saved["gauss"]))


def host_random_digest() -> tuple[int, ...]:
    """Return a digest of the states of python's and numpy's generators, which changes if a number is drawn."""
    return _digest_of(random.getstate(), _numpy_state())


def _digest_of(python: tuple[Any, ...], numpy: dict[str, Any]) -> tuple[int, int]:
    return hash(python), hash(pickle.dumps(numpy))


def _numpy_state() -> dict[str, Any]:
    """Return the state of numpy's global generator; empty without numpy."""
    # The legacy form warns about generators other than MT19937.
    return {} if NUMPY is None else NUMPY.random.get_state(legacy=False)
