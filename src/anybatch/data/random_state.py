"""The global random generators of this process: seeded together, and put back together."""

import importlib
import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

import torch

# Augmentations may draw from numpy, so it is seeded as well where it is installed. torch has imported it already.
_NUMPY: Final[ModuleType | None] = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
_NUMPY_SEEDS: Final = 1 << 32


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Put the global generators of python, numpy and torch (CPU) back at the end, also after an exception."""
    python_state = random.getstate()
    numpy_state = None if _NUMPY is None else _NUMPY.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if _NUMPY is not None:
            _NUMPY.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU): those that augmentations draw from.

    Args:
        seed: 64 bits; numpy takes the lower 32.
    """
    random.seed(seed)
    if _NUMPY is not None:
        _NUMPY.random.seed(seed % _NUMPY_SEEDS)  # which takes 32 bits
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would visit every device: a hundred times slower
