"""The project's files and their contents, for the architecture tests."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "anybatch"
GUIDE = ROOT / "guide" / "src" / "anybatch_guide"
PACKAGES = (PACKAGE, GUIDE)
TESTS = (ROOT / "tests", ROOT / "guide" / "tests")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Found:
    """A finding in a source file: path, line and text."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        """Return it in the format of compilers, so that editors can jump there."""
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{shown.as_posix()}:{self.line}: {self.what}"


def python_files(*folders: Path) -> list[Path]:
    """Return the Python files under folders, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.Module) -> Iterator[FunctionNode]:
    """Yield every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, FunctionNode))


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield every module that an import statement may import: `from a import b` may mean `a` and `a.b`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    """Return whether a dotted name is that package or inside it."""
    return module == package or module.startswith(f"{package}.")


def dotted_name(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute or a name, and an empty string for anything else."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""
