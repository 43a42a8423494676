"""Project files that could get out of sync: versions, reasons, decisions."""

import ast
import re
import tomllib
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


def test_files_that_start_first_exist() -> None:
    """Every long test file that `conftest.py` names exists: a renamed one would start last."""
    named = re.findall(r'"((?:guide/)?tests/[\w/]+\.py)"', (ROOT / "conftest.py").read_text(encoding="utf-8"))

    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def missing_imports(source: str) -> list[str]:
    """Return the errors of a program's imports from anybatch and its tests."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in {"anybatch", "tests"}:
            try:
                exec(ast.unparse(node), {})  # noqa: S102 (an import of a file of this repository)
            except ImportError as error:
                found.append(str(error))
    return found


def imports_from_elsewhere(source: str) -> bool:
    """Whether a program imports tests before it adds the root, which is not installed, to the import path."""
    before = source.partition("sys.path.insert(0, str(Path(__file__)")[0]
    return re.search(r"^from (tests|guide)\b", before, flags=re.MULTILINE) is not None


def test_programs_run_by_the_command_that_they_name() -> None:
    """A benchmark or example that imports tests runs from any working directory."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]

    assert [file.name for file in programs if imports_from_elsewhere(file.read_text(encoding="utf-8"))] == []
    assert imports_from_elsewhere("from tests.hosts import hosts")


@pytest.mark.slow
def test_imports_of_programs_exist() -> None:
    """Benchmarks and examples, which no test runs completely, import only existing names."""
    programs = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").glob("*.py")]

    assert [error for file in programs for error in missing_imports(file.read_text(encoding="utf-8"))] == []
    assert missing_imports("from anybatch.core.batch import Position, Gone")
