"""Project files that could get out of sync: versions, reasons, decisions."""

import ast
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

import anybatch
from anybatch.cli.main import VERBS, main
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


def test_versions_of_other_files() -> None:
    """The citation has anybatch's version, and pre-commit installs the ruff that `make check` runs."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (ruff,) = [need for need in project()["project"]["optional-dependencies"]["dev"] if need.startswith("ruff ")]

    assert f"\nversion: {anybatch.__version__}\n" in citation
    assert re.findall(r'"(ruff .*?)"', hooks) == [ruff, ruff]


def pages_of_the_site(navigation: str) -> set[str]:
    """Return the pages that the navigation of mkdocs.yml names, without generated ones; adds folders named `name/*`."""
    named = set(re.findall(r": ([\w./]+\.md|\w+/\*)$", navigation, flags=re.MULTILINE))
    return {name for name in named if not name.startswith("api/")}


def test_every_page_is_in_the_navigation() -> None:
    """The navigation of the site names each page of docs/, each public module, and no page that does not exist."""
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    root = {"index" if path.stem == "README" else path.stem.lower() for path in ROOT.glob("*.md")}
    others = {"decisions/*", "benchmarks/results/index.md", "examples/from_scratch/README.md"}
    source = ROOT / "src" / "anybatch"
    modules = {path.stem for path in source.glob("[a-z]*.py")} | {"data", "integrations", "norms", "testing"}

    assert pages_of_the_site(site) == {path.name for path in (ROOT / "docs").glob("*.md")} | others | {
        f"{name}.md" for name in root
    }
    assert set(re.findall(r"api/anybatch\.?(\w*)\.md", site)) == modules | {""} - {"md"}


def commands_in(page: str) -> list[list[str]]:
    """Return the words of each command of anybatch in a page."""
    return [command.split() for command in re.findall(r"`anybatch ([^`]+)`", page)]


def test_commands_for_agents_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Each command of AGENTS.md has a verb of the command line, and only options that its help lists."""
    commands = commands_in((ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    ends = {verb.name for verb in VERBS} - {"watch", "demo", "guide"}

    unknown = []
    for verb, *words in commands:
        if verb != "COMMAND":
            main([verb, "--help"])
            options = capsys.readouterr().out
            unknown += [(verb, word) for word in words if word.startswith("--") and f"{word} " not in options]

    assert unknown == []
    assert {verb for verb, *_ in commands} == ends | {"COMMAND"}


def built_metadata(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the metadata that hatch_build.py writes for the package in a folder; the build alone has hatchling."""
    interface = SimpleNamespace(MetadataHookInterface=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", cast("ModuleType", interface))
    metadata: dict[str, Any] = {}
    runpy.run_path(str(folder / "hatch_build.py"))["ProjectAddress"](root=str(folder)).update(metadata)
    return metadata


def test_the_address_is_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages get URLs, and absolute links in their README, from one setting; an empty one adds neither."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md"):
        for place in ("", "guide"):
            (tmp_path / place).mkdir(exist_ok=True)
            shutil.copy(ROOT / place / name, tmp_path / place / name)
    settings = tmp_path / "pyproject.toml"
    text = re.sub('^repository = ".*"$', 'repository = ""', settings.read_text(encoding="utf-8"), flags=re.MULTILINE)
    settings.write_text(text, encoding="utf-8")
    for folder in (tmp_path, tmp_path / "guide"):
        plain = built_metadata(folder, monkeypatch)
        assert plain["urls"] == {}
        assert plain["readme"]["text"] == (folder / "README.md").read_text(encoding="utf-8")

    address = "https://github.com/Someone/anybatch"
    settings.write_text(text.replace('repository = ""', f'repository = "{address}"'), encoding="utf-8")
    for folder, link in ((tmp_path, "blob/main/docs/gpu.md"), (tmp_path / "guide", "blob/main/guide/web/README.md")):
        public = built_metadata(folder, monkeypatch)
        targets = re.findall(r"\]\(([^()]*)\)", public["readme"]["text"])
        assert public["urls"]["Source"] == address
        assert public["urls"]["Documentation"] == "https://someone.github.io/anybatch/"
        assert f"{address}/{link}" in targets
        assert [target for target in targets if not target.startswith("https://")] == []
    assert (ROOT / "guide" / "hatch_build.py").read_bytes() == (ROOT / "hatch_build.py").read_bytes()


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
