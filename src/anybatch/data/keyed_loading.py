"""Loading each sample under its own random key, at the price of the generators that are used.

Putting python's, numpy's and torch's global generators aside and back takes 90 microseconds, and seeding them for a
sample 7: more than many a sample takes to load, for nothing where it draws no numbers. So the first samples show what a
data set draws from, and only that is seeded from then on. Whatever else moves all the same is noticed, by comparing
the generators' states, and what was being loaded is loaded again with that generator seeded too.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import torch

from anybatch.core.tree import Batch
from anybatch.data.fetch import Seed, UnitKey, UnitLoader, draws_nothing, only_collates
from anybatch.data.python_generator import PythonGenerator
from anybatch.data.random_state import NUMPY, NUMPY_SEEDS

T = TypeVar("T")
_MERSENNE_BYTES: Final = 625 * 4  # of numpy's MT19937: 624 words, and the place among them
_NUM_WORDS: Final = 624


class _Generator(Protocol):
    """A global generator of this process."""

    def seed(self, seed: int) -> None:
        """Begin the numbers of a key."""

    def look(self) -> Any:  # noqa: ANN401 (its own)
        """Return the state, as cheaply as it can be had: equal as long as nobody has drawn."""

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        """Return to a state that `keep` or `look` has returned."""

    def keep(self) -> Any:  # noqa: ANN401
        """Return the whole state."""

    def hides(self, state: Any) -> bool:  # noqa: ANN401
        """Whether a number could be drawn without a change in what `look` returns, which is this state now."""


class _Torch:
    keep = staticmethod(torch.default_generator.get_state)

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would visit every device: a hundred times slower

    def look(self) -> bytes:
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.numel())

    def put_back(self, state: torch.Tensor | bytes) -> None:
        if isinstance(state, bytes):
            state = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        torch.default_generator.set_state(state)

    def hides(self, state: Any) -> bool:  # noqa: ANN401, ARG002 (the protocol's)
        return False


class _Numpy:
    """numpy's, whose state takes 40 microseconds to ask for: its words are read where they are.

    Normal numbers are made in pairs, and the second one of a pair, which is kept for later, is not among the words.
    Whether there is one is asked for where the words have changed, as it can only have come with that.
    """

    def __init__(self) -> None:
        assert NUMPY is not None
        self._random = NUMPY.random
        self._array = NUMPY.frombuffer
        self._words: Any = None
        self._has_second = False

    def hides(self, state: Any) -> bool:  # noqa: ANN401
        if not isinstance(state, bytes):
            return False
        if state != self._words or self._has_second:
            self._words, self._has_second = state, bool(self.keep()["has_gauss"])
        return self._has_second

    def keep(self) -> Any:  # noqa: ANN401
        return self._random.get_state(legacy=False)

    def seed(self, seed: int) -> None:
        self._random.seed(seed % NUMPY_SEEDS)

    def look(self) -> Any:  # noqa: ANN401
        engine: Any = getattr(self._random, "get_bit_generator", lambda: None)()
        if type(engine) is not self._random.MT19937:  # an old numpy, or the user has put another one in its place
            return self.keep()
        return ctypes.string_at(engine.ctypes.state_address, _MERSENNE_BYTES)

    def put_back(self, state: Any) -> None:  # noqa: ANN401
        if isinstance(state, bytes):
            words = self._array(state, dtype="uint32")
            state = ("MT19937", words[:_NUM_WORDS].copy(), int(words[_NUM_WORDS]), 0, 0.0)
        self._random.set_state(state)


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401 (states of one generator)
    if isinstance(one, dict):
        return repr(one) == repr(other)
    return bool(one == other)


class KeyedLoading:
    """Loads under random keys, and leaves the caller's generators as they were. One for each data set and its collate.

    Args:
        draws_nothing: it is known to draw no numbers, so that nothing is looked at.
    """

    def __init__(self, *, draws_nothing: bool = False) -> None:
        self._generators: Sequence[_Generator] = (
            PythonGenerator(),
            _Torch(),
            *([_Numpy()] if NUMPY is not None else []),
        )
        if draws_nothing:
            self._generators = ()
        self._is_first = bool(self._generators)
        self._drawn: list[_Generator] = []

    def run(self, load: Callable[[Seed | None], T]) -> T:
        """Return `load(seed)`.

        Args:
            load: calls `seed(key)` before each thing that has random numbers of its own, unless it is None, as nothing
                draws. It may be called twice.
        """
        if self._is_first:
            return self._first(load)
        seeded: list[_Generator] = list(self._drawn)
        looked: list[tuple[_Generator, Any]] = []
        for generator in self._generators:
            if generator not in self._drawn:
                state = generator.look()
                if generator.hides(state):
                    seeded.append(generator)
                else:
                    looked.append((generator, state))
        kept = [(generator, generator.keep()) for generator in seeded]

        def seed(key: int) -> None:
            for generator in seeded:
                generator.seed(key)

        try:
            loaded = load(seed if seeded else None)
        finally:
            for generator, state in kept:
                generator.put_back(state)
            moved = [(generator, state) for generator, state in looked if not _same(generator.look(), state)]
            for generator, state in moved:
                generator.put_back(state)
        if not moved:
            return loaded
        self._drawn += [generator for generator, _ in moved]
        return self.run(load)

    def _first(self, load: Callable[[Seed | None], T]) -> T:
        """Seed all generators before each thing, and see which ones have moved since."""
        kept = [(generator, generator.keep()) for generator in self._generators]
        begun: list[Any] = []

        def note() -> None:
            for generator, state in zip(self._generators, begun, strict=False):
                if generator not in self._drawn and not _same(generator.look(), state):
                    self._drawn.append(generator)

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
        return loaded


class KeyedUnits:
    """Loads units, in the calling process or in a worker, each sample under its own key.

    Args:
        loader: loads one unit.
    """

    def __init__(self, loader: UnitLoader) -> None:
        self._loader = loader
        self._loading: KeyedLoading | None = None  # made where it is used: a worker has generators of its own

    def __call__(self, key: UnitKey) -> Batch:
        """Return one unit."""
        return next(self.load([key]))

    def load(self, keys: Sequence[UnitKey]) -> Iterator[Batch]:
        """Yield some units, whose samples are loaded at once; the caller's generators are left as they were.

        They are collated one by one, as they are asked for, unless their collate function may draw numbers.
        """
        loader, is_safe = self._loader, only_collates(self._loader.collate)
        if self._loading is None:
            self._loading = KeyedLoading(draws_nothing=is_safe and draws_nothing(loader.dataset))
        if not is_safe:
            yield from self._loading.run(lambda seed: [loader(key, seed) for key in keys])
            return
        samples = self._loading.run(lambda seed: [loader.samples(key, seed) for key in keys])
        for key, of_unit in zip(keys, samples, strict=True):
            yield loader.collated(key, of_unit, None)
