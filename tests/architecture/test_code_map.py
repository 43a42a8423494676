"""ARCHITECTURE.md's code map matches the tree."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from tests.architecture.source_tree import GUIDE, PACKAGE, PACKAGES, ROOT, TESTS, parse, python_files


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring; empty without a docstring or module."""
    return (ast.get_docstring(parse(path)) or "").partition("\n")[0] if path.exists() else ""


def drawn_map(text: str) -> dict[str, str]:
    """Return path -> description of each line of the block under "Code map"."""
    block = re.search(r"^## Code map$.*?^```text\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert block is not None, 'ARCHITECTURE.md needs a heading "## Code map" with a ```text block under it.'
    lines = [line.split(maxsplit=1) for line in block.group(1).splitlines() if line.strip()]
    return {line[0]: line[1] if len(line) > 1 else "" for line in lines}


def folders_of(package: Path, root: Path) -> dict[str, str]:
    """Return path -> first docstring line of each folder with code."""
    folders = sorted({path.parent for path in python_files(package)})
    return {f"{folder.relative_to(root).as_posix()}/": first_line(folder / "__init__.py") for folder in folders}


def real_map(package: Path, root: Path) -> dict[str, str]:
    """Return path -> first docstring line of each folder with code, and of each top-level module."""
    files = python_files(package)
    tops = [path for path in files if path.parent == package and path.stem not in ("__init__", "__main__")]
    return {**folders_of(package, root), **{path.relative_to(root).as_posix(): first_line(path) for path in tops}}


def as_block(entries: Mapping[str, str]) -> str:
    """Return a map in the format of the page."""
    width = max(map(len, entries))
    return "\n".join(f"{path:<{width}}  {line}" for path, line in entries.items())


def test_map_matches_the_tree() -> None:
    """The code map has one line per folder, with the first line of its docstring."""
    drawn = drawn_map((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    real = real_map(PACKAGE, ROOT) | folders_of(GUIDE, ROOT)

    ordered = {path: real[path] for path in [*drawn, *real] if path in real}
    assert drawn == real, (
        f"the code map in ARCHITECTURE.md should be, in an order that reads well:\n{as_block(ordered)}"
    )


def test_every_module_is_named_after_an_idea() -> None:
    """No folder or file is called utils, helpers, common, misc or manager, alone or as part of a name."""
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "managers"}
    paths = [path.relative_to(ROOT) for path in python_files(*PACKAGES, *TESTS)]

    assert [path for path in paths if any(empty & set(Path(part).stem.split("_")) for part in path.parts)] == []
