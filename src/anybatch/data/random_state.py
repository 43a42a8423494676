"""Seed and restore the global random generators of this process; load each sample under its own random key.

Saving and restoring python's, numpy's and torch's global generators takes 90 microseconds, and seeding them for a
sample 7: longer than many samples take to load, and useless if loading draws no numbers. So the first samples show
which generators a data set draws from, and only these are seeded afterwards. If data are later drawn from another one,
a comparison of states detects it, and the load is repeated with that generator seeded too. Reading a
state with `getstate` takes 10 to 50 microseconds, so the words of python's and numpy's are read from memory.
"""

import ctypes
import importlib
import importlib.util
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, Protocol, TypeVar

import torch

from anybatch.errors import CheckpointError

# Augmentations may draw from numpy, so it is seeded too if installed (torch has imported it already).
NUMPY: Final[ModuleType | None] = importlib.import_module("numpy") if importlib.util.find_spec("numpy") else None
NUMPY_SEEDS: Final = 1 << 32
_TWISTER: Final = "MT19937"  # numpy's global generator, unless a program sets another


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
        self._digest = _digest(self._python, self._numpy)

    def keep_if_drawn(self) -> "HostDraws | None":
        """Return this state if a number was drawn since, else None."""
        return self if host_random_digest() != self._digest else None

    def restore(self) -> None:
        """Set the generators to this state."""
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
                f"numpy's global generator is {numpy['bit_generator']}, and checkpoints hold the state of {_TWISTER} "
                "only. Leave numpy's own generator in place, and pass yours to the code that draws from it."
            )
            raise CheckpointError(message, code="numpy_generator")
        kind, keys, place = _TWISTER, numpy["state"]["key"], numpy["state"]["pos"]
        has_gauss, numpy_gauss = numpy["has_gauss"], numpy["gauss"]
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
    return _digest(random.getstate(), _numpy_state())


def _numpy_state() -> dict[str, Any]:
    """Return the state of numpy's global generator; empty without numpy."""
    return {} if NUMPY is None else NUMPY.random.get_state(legacy=False)  # the legacy form warns of other generators


def _digest(python: tuple[Any, ...], numpy: Mapping[str, Any]) -> tuple[int, ...]:
    if numpy.get("bit_generator") != _TWISTER:
        return hash(python), hash(pickle.dumps(numpy))
    words, place = numpy["state"]["key"], numpy["state"]["pos"]
    return hash(python), hash((words.tobytes(), place, numpy["has_gauss"], numpy["gauss"]))


T = TypeVar("T")
Seed = Callable[[int], object]
_NUM_WORDS: Final = 624  # of a Mersenne Twister, in python and in numpy
_NUMPY_BYTES: Final = (_NUM_WORDS + 1) * 4  # numpy stores the words, then an index
_PYTHON_FORM: Final = struct.Struct(f"=i{_NUM_WORDS}I")  # CPython stores the index first
_PYTHON_VERSION: Final = 3


class _Generator(Protocol):
    """A global generator of this process."""

    def seed(self, seed: int) -> object:
        """Start the numbers of a key."""

    def look(self) -> Any:  # noqa: ANN401 (its own)
        """Return a cheap state to compare: equal unless a number was drawn; None if no cheap state exists."""

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        """Restore a state from `keep` or `look`."""

    def keep(self) -> Any:  # noqa: ANN401
        """Return the complete state."""


class PythonGenerator:
    """Python's global generator; with `reads`, its words are read from memory if possible."""

    def __init__(self, *, reads: bool = True) -> None:
        owner: Any = getattr(random.getstate, "__self__", None)
        self._owner = owner
        self._words = words_of(owner) if reads and type(owner) is random.Random else None

    # Looked up at each call: a program may replace the functions of `random`.
    def keep(self) -> Any:  # noqa: ANN401
        """Return the complete state."""
        return random.getstate()

    def seed(self, seed: int) -> None:
        """Start the numbers of a key."""
        random.seed(seed)

    def look(self) -> Any:  # noqa: ANN401
        """Return a state that changes with every drawn number; it includes the second number of a normal pair."""
        return random.getstate() if self._words is None else (self._words(), self._owner.gauss_next)

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        """Restore a state from `keep` or `look`."""
        random.setstate(_from_words(*state) if isinstance(state[0], bytes) else state)


def words_of(owner: random.Random) -> Callable[[], bytes] | None:
    """Return a function that reads the words of a generator from memory, or None if the layout differs.

    CPython's `_random.Random` stores them after the object header; the result is compared with `getstate` once. The
    generator has to outlive the function.
    """
    offset = object.__basicsize__
    base = random.Random.__base__
    if sys.implementation.name != "cpython" or base is None or base.__basicsize__ < offset + _PYTHON_FORM.size:
        return None
    place = (ctypes.c_char * _PYTHON_FORM.size).from_address(id(owner) + offset)
    if not hasattr(owner, "gauss_next") or _from_words(place.raw, owner.gauss_next) != owner.getstate():
        return None
    return lambda: place.raw


def _from_words(words: bytes, gauss: float | None) -> tuple[int, tuple[int, ...], float | None]:
    """Return the state as `getstate` does, with the index last."""
    index, *numbers = _PYTHON_FORM.unpack(words)
    return _PYTHON_VERSION, (*numbers, index), gauss


class _Torch:
    keep = staticmethod(torch.default_generator.get_state)
    seed = staticmethod(torch.default_generator.manual_seed)  # torch.manual_seed visits all devices: 100 times slower

    def look(self) -> bytes:
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def put_back(self, state: torch.Tensor | bytes) -> None:
        if isinstance(state, bytes):
            state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.default_generator.set_state(state)


class _OtherState:
    """The state of a non-default numpy generator: a dict of arrays, which do not compare as a whole."""

    def __init__(self, state: Any) -> None:  # noqa: ANN401
        self.state = state
        self.shown = repr(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OtherState) and self.shown == other.shown

    __hash__ = None  # type: ignore[assignment]  # compared, never hashed


class _Numpy:
    """numpy's generator. Its `get_state` takes 40 microseconds, so its words are read directly from memory.

    Normal numbers are drawn in pairs, and the cached second one is not part of the words. Whether it exists is checked
    only after the words change, since it appears only then.
    """

    def __init__(self) -> None:
        assert NUMPY is not None
        self._random = NUMPY.random
        self._array = NUMPY.frombuffer
        self._engine: Any = None
        self._place: Any = None  # memory of the generator's words
        self._words: bytes | None = None
        self._has_second = False

    def keep(self) -> Any:  # noqa: ANN401
        return self._random.get_state(legacy=False)

    def seed(self, seed: int) -> None:
        self._random.seed(seed % NUMPY_SEEDS)

    def look(self) -> Any:  # noqa: ANN401
        """Return the words; None if the second number of a pair is cached, which can be drawn without changing them."""
        engine: Any = getattr(self._random, "get_bit_generator", lambda: None)()
        if engine is not self._engine:
            self._engine, self._place = engine, None
            if type(engine) is self._random.MT19937:
                self._place = (ctypes.c_char * _NUMPY_BYTES).from_address(engine.ctypes.state_address)
        if self._place is None:  # an old numpy, or a user's generator
            return _OtherState(self.keep())
        words: bytes = self._place.raw
        if words != self._words or self._has_second:
            self._words, self._has_second = words, bool(self.keep()["has_gauss"])
        return None if self._has_second else words

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        if isinstance(state, bytes):
            words = self._array(state, dtype="uint32")
            state = ("MT19937", words[:_NUM_WORDS].copy(), int(words[_NUM_WORDS]), 0, 0.0)
        self._random.set_state(state.state if isinstance(state, _OtherState) else state)


class KeyedLoading:
    """Loads under random keys and restores the caller's generators; one instance per data set and collate function.

    With `draws_nothing`, loading is known to draw no numbers and nothing is checked.
    """

    def __init__(self, *, draws_nothing: bool = False) -> None:
        self._generators: Sequence[_Generator] = (
            PythonGenerator(),
            _Torch(),
            *([_Numpy()] if NUMPY is not None else []),
        )
        self.draws_nothing = draws_nothing
        if draws_nothing:
            self._generators = ()
        self._is_first = bool(self._generators)
        self._drawn: list[_Generator] = []
        self._watched: Sequence[_Generator] = ()  # all generators not in `_drawn`

    def run(self, load: Callable[[Seed | None], T]) -> T:
        """Return `load(seed)`, possibly calling it twice.

        `load` calls `seed(key)` before each item with its own random numbers, unless `seed` is None because nothing
        draws.
        """
        if self._is_first:
            return self._first(load)
        if not self._generators:
            return load(None)
        watched, seeded = self._watched, self._drawn
        seen = [generator.look() for generator in watched]
        if None in seen:
            seeded = seeded + [generator for generator, state in zip(watched, seen, strict=True) if state is None]
        kept = [(generator, generator.keep()) for generator in seeded]

        def seed_each(key: int) -> None:
            for generator in seeded:
                generator.seed(key)

        seed = seeded[0].seed if len(seeded) == 1 else seed_each
        moved: list[_Generator] = []
        try:
            loaded = load(seed if seeded else None)
        finally:
            for generator, state in kept:
                generator.put_back(state)
            if [generator.look() for generator in watched] != seen:
                moved = _put_back_moved(watched, seen)
        if not moved:
            return loaded
        self._note_drawn([*self._drawn, *moved])
        return self.run(load)

    def _note_drawn(self, drawn: list[_Generator]) -> None:
        self._drawn = drawn
        self._watched = [generator for generator in self._generators if generator not in drawn]

    def _first(self, load: Callable[[Seed | None], T]) -> T:
        """Seed all generators before each item, and record which ones were used."""
        kept = [(generator, generator.keep()) for generator in self._generators]
        begun: list[Any] = []
        drawn: list[_Generator] = []

        def note() -> None:
            for generator, state in zip(self._generators, begun, strict=False):
                if generator not in drawn and generator.look() != state:
                    drawn.append(generator)

        def seed(key: int) -> None:
            note()
            for generator in self._generators:
                generator.seed(key)
            begun[:] = [generator.look() for generator in self._generators]

        try:
            loaded = load(seed)
            note()
        finally:
            for generator, state in kept:
                generator.put_back(state)
        self._is_first = False
        self._note_drawn(drawn)
        return loaded


def _put_back_moved(generators: Sequence[_Generator], seen: Sequence[Any]) -> list[_Generator]:
    """Restore and return the generators whose state has changed."""
    pairs = zip(generators, seen, strict=True)
    moved = [(generator, state) for generator, state in pairs if generator.look() != state]
    for generator, state in moved:
        generator.put_back(state)
    return [generator for generator, _ in moved]
