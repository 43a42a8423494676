"""Read the state of Python's global generator directly from CPython's memory.

`random.getstate` creates a tuple of 625 integers, which takes 10 to 20 microseconds. It would run before and after each
load, and many samples load in less time. CPython's `_random.Random` stores the same words after the object header: the
index as a C int, then 624 words of 32 bits. This module compares them with `getstate` once, and uses `getstate` in
other Python implementations and if the layout differs.
"""

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

_NUM_WORDS: Final = 624
_FORM: Final = struct.Struct(f"=i{_NUM_WORDS}I")
_VERSION: Final = 3

Look = tuple[bytes, float | None]
"""The words, and the cached second number of a pair of normal random numbers."""


class PythonGenerator:
    """Python's global generator; with `reads`, its words are read from memory if possible."""

    def __init__(self, *, reads: bool = True) -> None:
        owner: Any = getattr(random.getstate, "__self__", None)
        self._owner = owner
        self._words = words_of(owner) if reads and type(owner) is random.Random else None

    def seed(self, seed: int) -> None:
        """Seed the generator with a key."""
        random.seed(seed)

    def keep(self) -> Any:  # noqa: ANN401 (python's)
        """Return the complete state."""
        return random.getstate()

    def look(self) -> Any:  # noqa: ANN401
        """Return a state that changes with every drawn number."""
        return random.getstate() if self._words is None else (self._words(), self._owner.gauss_next)

    def hides(self, state: Any) -> bool:  # noqa: ANN401, ARG002 (the protocol's)
        """Return False: every drawn number changes the result of `look`."""
        return False

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        """Restore a state from `keep` or `look`."""
        random.setstate(_asked(state) if isinstance(state[0], bytes) else state)


def words_of(owner: random.Random) -> Callable[[], bytes] | None:
    """Return a function that reads the words of a generator from memory, or None if the layout differs.

    The generator has to outlive the function.
    """
    offset = object.__basicsize__
    base = random.Random.__base__
    if sys.implementation.name != "cpython" or base is None or base.__basicsize__ < offset + _FORM.size:
        return None
    place = (ctypes.c_char * _FORM.size).from_address(id(owner) + offset)

    def read() -> bytes:
        return place.raw

    if not hasattr(owner, "gauss_next") or _asked((read(), owner.gauss_next)) != owner.getstate():
        return None
    return read


def _asked(state: Look) -> tuple[int, tuple[int, ...], float | None]:
    """Return the words from `getstate`, where the index comes last."""
    place, *words = _FORM.unpack(state[0])
    return _VERSION, (*words, place), state[1]
