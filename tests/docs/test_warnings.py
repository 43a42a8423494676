"""The page of warnings lists exactly the warnings that the engine can raise."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETURNED = ("checkpoint_state.py", "data_progress.py")
"""Files whose functions return a code and its message."""


def codes_given() -> set[str]:
    """Return the codes passed to a notifier's `warn`, and the codes of remarks when loading a checkpoint."""
    found = set()
    for path in (ROOT / "src/anybatch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            first: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warn":
                named = ast.unparse(node.func.value)
                first = node.args[0] if named.endswith("notifier") else None
            elif isinstance(node, ast.Tuple) and path.name in RETURNED and len(node.elts) == 2:
                first = node.elts[0] if ast.unparse(node.elts[1]) == "message" else None
            if isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found


@pytest.mark.slow
def test_every_warning_is_on_its_page() -> None:
    """The table in docs/warnings.md has exactly the codes of the sources."""
    page = (ROOT / "docs/warnings.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == codes_given()
