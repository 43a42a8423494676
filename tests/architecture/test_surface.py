"""The public surface: `anybatch.__all__` says what there is, in order, documented."""

import inspect
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest

import anybatch
from anybatch import records

MAX_NAMES = 27  # the 23 of training, the questions about it (advise, check, plan), and the seam to look in (Observer)


def public_names(module: object) -> list[str]:
    """Return the names a module offers: those without underscore that are no modules."""
    return sorted(name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType))


def undocumented(module: object, names: list[str]) -> list[str]:
    """Return the names whose values have no docstring of their own."""
    values = {name: getattr(module, name) for name in names if not name.startswith("__")}
    own = {name: getattr(value, "__doc__", None) for name, value in values.items()}
    generated = {
        name: f"{name}(" for name, value in values.items() if inspect.isclass(value)
    }  # a dataclass without docstring gets its signature for one
    return [name for name, text in own.items() if not text or text.startswith(generated.get(name, "\0"))]


def test_surface_is_listed() -> None:
    """`__all__` is sorted and holds exactly the public names of the package, also those that were not used yet."""
    listed = list(anybatch.__all__)
    homes = {getattr(anybatch, name).__module__ for name in listed}

    assert listed == sorted(listed)
    assert set(listed) <= set(dir(anybatch))
    assert all(home.startswith("anybatch.") for home in homes)
    assert [name for name in listed if name[0] != "_"] == public_names(anybatch)


def test_surface_is_small() -> None:
    """There are at most 27 public names to learn."""
    assert len(anybatch.__all__) <= MAX_NAMES


def test_surface_is_documented() -> None:
    """Everything public has a docstring."""
    assert undocumented(anybatch, list(anybatch.__all__)) == []


def test_records_are_public() -> None:
    """`anybatch.records` has every kind of record, and `Observers`, sorted and documented."""
    kinds = {kind.__name__ for kind in get_args(records.Record)}
    assert kinds < set(records.__all__)
    assert records.__all__ == sorted(records.__all__)
    assert undocumented(records, sorted({"Observers", *kinds})) == []


def test_the_version_is_there() -> None:
    """`anybatch.__version__` is the version of what is installed."""
    assert anybatch.__version__ == version("anybatch")


def test_gaps_are_seen() -> None:
    """A name without docstring is found; an imported module is no public name."""

    def silent() -> None: ...

    module = SimpleNamespace(silent=silent, inspect=inspect, listed=test_gaps_are_seen, _private=1)
    assert public_names(module) == ["listed", "silent"]
    assert undocumented(module, ["listed", "silent"]) == ["silent"]


def test_other_names_are_an_error() -> None:
    """A name that does not exist is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = anybatch.Trainer
