"""Seed and restore the global random generators of this process together."""

import importlib
import importlib.util
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch

# Augmentations may draw from numpy, so it is seeded too if installed (torch has imported it already).
NUMPY: Final[ModuleType | None] = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
NUMPY_SEEDS: Final = 1 << 32


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the global generators of python, numpy and torch (CPU) at the end, also after an exception."""
    python_state = random.getstate()
    numpy_state = None if NUMPY is None else NUMPY.random.get_state(legacy=False)
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        if NUMPY is not None:
            NUMPY.random.set_state(numpy_state)
        torch.default_generator.set_state(torch_state)


def seed_generators(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (CPU), from which augmentations draw.

    The seed has 64 bits; numpy takes the lower 32.
    """
    random.seed(seed)
    if NUMPY is not None:
        NUMPY.random.seed(seed % NUMPY_SEEDS)  # numpy takes 32 bits
    torch.default_generator.manual_seed(seed)  # torch.manual_seed visits all devices: 100 times slower


class HostDraws:
    """The global generators of python and numpy, before a forward that has to draw the same numbers again.

    The state is kept only if the forward drew from them: few do.
    """

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def keep_if_drawn(self) -> "HostDraws | None":
        """Return this state if a number was drawn since, else None."""
        numpy = _numpy_state()
        drawn = random.getstate() != self._python or any(map(_differs, numpy or (), self._numpy or ()))
        return self if drawn else None

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self._python)
        if NUMPY is not None:
            NUMPY.random.set_state(self._numpy)


def _numpy_state() -> tuple[Any, ...] | None:
    return None if NUMPY is None else NUMPY.random.get_state()


def _differs(one: Any, other: Any) -> bool:  # noqa: ANN401 (numbers, a name and an array)
    return bool(one.tobytes() != other.tobytes() if hasattr(one, "tobytes") else one != other)


def host_random_state() -> dict[str, Any]:
    """Return the state of python's global generator, and of numpy's if installed, as tensors and numbers."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": {"version": version, "words": torch.tensor(words), "gauss": gauss}}
    if NUMPY is not None:
        kind, keys, place, has_gauss, numpy_gauss = NUMPY.random.get_state()
        words = torch.tensor([int(key) for key in keys])
        state["numpy"] = {"kind": kind, "words": words, "place": place, "has_gauss": has_gauss, "gauss": numpy_gauss}
    return state


def restore_host_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generators to a state from `host_random_state`; a missing one is left unchanged."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if NUMPY is not None and "numpy" in state:
        saved = state["numpy"]
        words = NUMPY.array(saved["words"].tolist(), dtype=NUMPY.uint32)
        NUMPY.random.set_state((saved["kind"], words, saved["place"], saved["has_gauss"], saved["gauss"]))


def host_random_digest() -> tuple[int, ...]:
    """Return a digest of python's generator, and of numpy's: equal unless a number was drawn."""
    found = [hash(random.getstate())]
    if NUMPY is not None:
        kind, keys, *rest = NUMPY.random.get_state()
        found.append(hash((kind, keys.tobytes(), *rest)))
    return tuple(found)
