"""Load each sample under its own random key, saving and seeding only the generators in use.

Saving and restoring python's, numpy's and torch's global generators takes 90 microseconds, and seeding them for a
sample 7: longer than many samples take to load, and useless if loading draws no numbers. So the first samples show
which generators a data set draws from, and only these are seeded afterwards. If data are later drawn from another one,
a comparison of states detects it, and the load is repeated with that generator seeded too.
"""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

import torch

from anybatch.core.tree import Batch
from anybatch.data.fetch import Seed, UnitKey, UnitLoader, draws_nothing, only_collates
from anybatch.data.python_generator import PythonGenerator
from anybatch.data.random_state import NUMPY, NUMPY_SEEDS

T = TypeVar("T")
_MERSENNE_BYTES: Final = 625 * 4  # numpy's MT19937: 624 words and an index
_NUM_WORDS: Final = 624


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
                self._place = (ctypes.c_char * _MERSENNE_BYTES).from_address(engine.ctypes.state_address)
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


class KeyedUnits:
    """Loads units, in the calling process or in a worker, each sample under its own key."""

    def __init__(self, loader: UnitLoader) -> None:
        self._loader = loader
        self._only_collates = only_collates(loader.collate)
        self._loading: KeyedLoading | None = None  # created on first use, because a worker has its own generators

    def __call__(self, key: UnitKey) -> Batch:
        """Return one unit."""
        return next(iter(self.load([key])))

    def load(self, keys: Sequence[UnitKey]) -> Iterable[Batch]:
        """Return several units, with their samples loaded together; restores the caller's generators.

        Units are collated lazily, one by one, unless the collate function may draw numbers.
        """
        loader = self._loader
        if self._loading is None:
            self._loading = KeyedLoading(draws_nothing=self._only_collates and draws_nothing(loader.dataset))
        if not self._only_collates:
            return self._loading.run(lambda seed: [loader(key, seed) for key in keys])
        if self._loading.draws_nothing:
            samples = [loader.samples(key, None) for key in keys]
        else:
            samples = self._loading.run(lambda seed: [loader.samples(key, seed) for key in keys])
        return map(loader.collated, keys, samples)
