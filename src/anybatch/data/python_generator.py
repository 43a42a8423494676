"""Python's global generator, looked at where CPython keeps it.

`random.getstate` makes a tuple of 625 whole numbers: 10 to 20 microseconds, before and after whatever is loaded, which
is more than many a sample takes to load. CPython's `_random.Random` holds the same words behind the head of the object,
one after the other: the place among them as a C int, and 624 words of 32 bits. That they are there is seen by comparing
with `getstate`; in another Python, or where they are not, `getstate` is what is used.
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
"""The words, and the normal number that was made with the one before and is kept for the next."""


class PythonGenerator:
    """Python's global generator.

    Args:
        reads: look at the words where they lie, if that can be done; False: ask for them.
    """

    def __init__(self, *, reads: bool = True) -> None:
        owner: Any = getattr(random.getstate, "__self__", None)
        self._owner = owner
        self._words = words_of(owner) if reads and type(owner) is random.Random else None

    def seed(self, seed: int) -> None:
        """Begin the numbers of a key."""
        random.seed(seed)

    def keep(self) -> Any:  # noqa: ANN401 (python's)
        """Return the whole state."""
        return random.getstate()

    def look(self) -> Any:  # noqa: ANN401
        """Return the state, equal as long as nobody has drawn."""
        return random.getstate() if self._words is None else (self._words(), self._owner.gauss_next)

    def hides(self, state: Any) -> bool:  # noqa: ANN401, ARG002 (the protocol's)
        """Whether a number could be drawn without a change in what `look` returns: none could."""
        return False

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        """Return to a state that `keep` or `look` has returned."""
        random.setstate(_asked(state) if isinstance(state[0], bytes) else state)


def words_of(owner: random.Random) -> Callable[[], bytes] | None:
    """Return what reads the words of a generator where they lie; None where they do not lie there.

    Args:
        owner: the generator; it has to stay as long as it is read.
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
    """Return the words as `getstate` has them: the place among them comes last."""
    place, *words = _FORM.unpack(state[0])
    return _VERSION, (*words, place), state[1]
