"""The public API: `anybatch.__all__` is complete, sorted and documented."""

import inspect
import re
from types import ModuleType
from typing import get_args

import pytest

import anybatch
from anybatch import noise, records, scaling, schedules, sizes, spikes, strategies
from tests.architecture.source_tree import ROOT

MAX_NAMES = 27  # 23 for training, three questions about it (advise, check, plan), and Observer


def public_names(module: object) -> list[str]:
    """Return the public names of a module, without modules."""
    return sorted(name for name, value in vars(module).items() if name[0] != "_" and not isinstance(value, ModuleType))


def undocumented(module: object, names: list[str]) -> list[str]:
    """Return the names whose values have no docstring."""
    values = {name: getattr(module, name) for name in names if not name.startswith("__")}
    own = {name: getattr(value, "__doc__", None) for name, value in values.items()}
    generated = {
        name: f"{name}(" for name, value in values.items() if inspect.isclass(value)
    }  # a dataclass without docstring gets its signature for one
    return [name for name, text in own.items() if not text or text.startswith(generated.get(name, "\0"))]


def test_surface_is_listed() -> None:
    """`__all__` is sorted and has exactly the public names of the package, including lazy ones."""
    listed = list(anybatch.__all__)
    homes = {getattr(anybatch, name).__module__ for name in listed}

    assert listed == sorted(listed)
    assert set(listed) <= set(dir(anybatch))
    assert all(home.startswith("anybatch.") for home in homes)
    assert [name for name in listed if name[0] != "_"] == public_names(anybatch)


def test_surface_is_small() -> None:
    """There are at most 27 public names."""
    assert len(anybatch.__all__) <= MAX_NAMES


def test_surface_is_documented() -> None:
    """Every public name has a docstring."""
    assert undocumented(anybatch, list(anybatch.__all__)) == []


def test_records_are_public() -> None:
    """`anybatch.records` has every kind of record, and `Observers`, sorted and documented."""
    kinds = {kind.__name__ for kind in get_args(records.Record)}
    assert kinds < set(records.__all__)
    assert records.__all__ == sorted(records.__all__)
    assert undocumented(records, sorted({"Observers", *kinds})) == []


FACADES = (noise, records, scaling, schedules, sizes, spikes, strategies)


@pytest.mark.parametrize("facade", FACADES)
def test_facades_are_documented(facade: ModuleType) -> None:
    """A module that collects public names lists exactly these, each with a docstring."""
    aliases = {"Flag", "PhaseName", "Record", "Scalar", "SpanEvent"}  # types without docstrings

    assert sorted(facade.__all__) == public_names(facade)
    assert undocumented(facade, sorted(set(facade.__all__) - aliases)) == []


def test_pages_import_from_one_level() -> None:
    """Pages import only from `anybatch` or its direct submodules."""
    pages = [page for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if page.name != "log.md"]
    deep = re.compile(
        r"(?:from|import) (anybatch\.\w+\.[\w.]+)|"  # an import
        r"\b(anybatch\.(?:core|engine|parallel|recipes|planner|data|events|memory|norms)\.[a-z_]+\.[\w.]+)"
    )
    found = [f"{page.name}: {match[0]}" for page in pages for match in deep.finditer(page.read_text(encoding="utf-8"))]

    assert found == []
