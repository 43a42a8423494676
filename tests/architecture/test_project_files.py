"""Project files that could get out of sync: versions, reasons, decisions."""

import ast
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import anybatch
from tests.architecture.source_tree import ROOT


def project(folder: str = "") -> dict[str, Any]:
    """Return the pyproject.toml of a folder, by default the root's."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))


def top_version(changelog: str) -> str:
    """Return the version of a changelog's first entry."""
    heading = re.search(r"^## \[?(\d+\.\d+\.\d+\w*)", changelog, flags=re.MULTILINE)
    assert heading is not None, "CHANGELOG.md has no entry: a line such as '## 0.1.0'."
    return heading.group(1)


def test_changelog_is_up_to_date() -> None:
    """The changelog starts with the version of the package."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert top_version(changelog) == anybatch.__version__
    assert "version" in project()["project"]["dynamic"]


def test_the_guide_is_of_the_same_release() -> None:
    """The guide has anybatch's version and license, and requires exactly that version."""
    guide = project("guide")["project"]

    assert guide["version"] == anybatch.__version__
    assert f"anybatch[recipes] == {anybatch.__version__}" in guide["dependencies"]
    assert (ROOT / "guide" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_files_that_begin_first_are_there() -> None:
    """Every long test file that `conftest.py` names exists: a renamed one would start last."""
    named = re.findall(r'"((?:guide/)?tests/[\w/]+\.py)"', (ROOT / "conftest.py").read_text(encoding="utf-8"))

    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def is_module(name: str) -> bool:
    """Return whether a module of that name exists."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is not a package
        return False


def missing_imports(file: Path) -> list[str]:
    """Return the names that a program imports from anybatch and its tests but that do not exist."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"anybatch", "tests"}:
            module = importlib.import_module(str(node.module))
            paths = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            gone = [path for name, path in paths.items() if not hasattr(module, name) and not is_module(path)]
            found += [f"{file.name}: {path}" for path in gone]
    return found


def imports_from_elsewhere(file: Path) -> list[str]:
    """Return imports from tests that a program makes before it adds the root to the import path.

    `python benchmarks/NAME.py` searches benchmarks/, and the root is not an installed package.
    """
    found, looks_at_root = [], False
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        looks_at_root |= ast.unparse(node).startswith("sys.path.insert(0, str(Path(__file__)")
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in {"tests", "guide"}:
            found += [] if looks_at_root else [f"{file.name}: {node.module}"]
    return found


def test_programs_run_by_the_command_that_they_name(tmp_path: Path) -> None:
    """A benchmark or example that imports tests runs from any working directory."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert [lost for file in programs for lost in imports_from_elsewhere(file)] == []

    (tmp_path / "lost.py").write_text("from tests.hosts import hosts", encoding="utf-8")
    assert imports_from_elsewhere(tmp_path / "lost.py") == ["lost.py: tests.hosts"]


@pytest.mark.slow
def test_what_programs_import_is_there(tmp_path: Path) -> None:
    """Benchmarks and examples, which no test runs completely, import only existing names."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    assert [missing for file in programs for missing in missing_imports(file)] == []

    (tmp_path / "old.py").write_text("from anybatch.core.batch import Position, Gone", encoding="utf-8")
    assert missing_imports(tmp_path / "old.py") == ["old.py: anybatch.core.batch.Gone"]
