"""Modules have meaningful names, and every test states its claim."""

import ast
from pathlib import Path

import pytest

from tests.architecture.source_tree import PACKAGES, ROOT, TESTS, Found, functions, parse, python_files

DRAWERS = frozenset({"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"})


def drawers(paths: list[Path]) -> list[str]:
    """Return the paths with a meaningless folder or file name."""
    return [path.as_posix() for path in paths if any(DRAWERS & set(Path(part).stem.split("_")) for part in path.parts)]


def silent_tests(tree: ast.Module) -> list[ast.AST]:
    """Return the test functions without a docstring."""
    return [f for f in functions(tree) if f.name.startswith("test_") and not ast.get_docstring(f)]


def test_every_module_is_named_after_an_idea() -> None:
    """No folder or file is called utils, helpers, common, misc or manager, alone or as part of a name."""
    paths = [path.relative_to(ROOT) for path in python_files(*PACKAGES, *TESTS)]

    assert drawers(paths) == []


@pytest.mark.parametrize("path", ["src/utils.py", "src/common/a.py", "tests/data_helpers.py", "a/manager/b/c.py"])
def test_drawers_are_seen(path: str) -> None:
    """Such a name is found at any depth."""
    assert drawers([Path(path), Path("src/communication.py"), Path("src/manage.py")]) == [path]


@pytest.mark.slow
def test_every_test_says_its_claim() -> None:
    """Every test function has a docstring."""
    found = [
        Found(path, getattr(function, "lineno", 1), "a test without its claim")
        for path in python_files(*TESTS)
        for function in silent_tests(parse(path))
    ]

    assert not found, "\n".join(map(str, found))


def test_silent_tests_are_seen() -> None:
    """A test without a docstring is found, also in a class."""
    (silent,) = silent_tests(
        ast.parse("class TestIt:\n    def test_a(self): pass\n    def test_b(self):\n        'Claim.'")
    )

    assert getattr(silent, "name", None) == "test_a"
