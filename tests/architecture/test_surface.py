"""The public API is small, and pages use nothing else; ruff wants a docstring for each name, and `__all__` sorted."""

import re
from inspect import isclass, isfunction
from types import ModuleType
from typing import get_args, get_type_hints

import anybatch
from anybatch import records
from tests.architecture.source_tree import ROOT

MAX_NAMES = 30  # 25 for training, three questions about it (advise, check, plan), Observer, and record


def test_surface_is_listed() -> None:
    """`__all__` has exactly the public names of the package, all imported on first use, and at most `MAX_NAMES`."""
    listed = {name: getattr(anybatch, name) for name in anybatch.__all__}
    public = {name for name, value in vars(anybatch).items() if name[0] != "_" and not isinstance(value, ModuleType)}

    assert all(value.__module__.startswith("anybatch.") for value in listed.values())
    assert set(listed) == public
    assert set(listed) <= set(dir(anybatch))
    assert len(listed) <= MAX_NAMES


def test_annotations_resolve() -> None:
    """`typing.get_type_hints` works on each public function and method, as tools that read signatures need."""
    unresolved = []
    for name in anybatch.__all__:
        value = getattr(anybatch, name)
        methods = [item for item in vars(value).values() if isfunction(item)] if isclass(value) else []
        for function in (value, *methods):
            try:
                get_type_hints(function)
            except NameError as error:
                unresolved.append(f"{getattr(function, '__qualname__', name)}: {error}")

    assert unresolved == []


def test_records_are_public() -> None:
    """`anybatch.records` has every kind of record."""
    assert {kind.__name__ for kind in get_args(records.Record)} < set(records.__all__)


def test_pages_import_from_one_level() -> None:
    """Pages import only from `anybatch` or its direct submodules."""
    pages = [page for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if page.name != "log.md"]
    deep = re.compile(
        r"(?:from|import) (anybatch\.\w+\.[\w.]+)|"  # an import
        r"\b(anybatch\.(?:core|engine|parallel|recipes|planner|data|events|memory|norms)\.[a-z_]+\.[\w.]+)"
    )
    found = [f"{page.name}: {match[0]}" for page in pages for match in deep.finditer(page.read_text(encoding="utf-8"))]

    assert found == []
