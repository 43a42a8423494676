"""The outputs shown in the README are current, except times and speeds."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def writer() -> ModuleType:
    """Return docs/write_readme_outputs.py."""
    spec = importlib.util.spec_from_file_location("write_readme_outputs", ROOT / "docs" / "write_readme_outputs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape(output: str) -> list[str]:
    """Return the lines of an output without numbers, versions, units and progress lines."""
    lines = [line for line in output.splitlines() if not re.match(r"step +\d+ of \d+   loss", line)]
    plain = [re.sub(r"\d[\d.,]*(\+\w+|e[+-]?\d+)?", "#", line) for line in lines]
    return [re.sub(r"(# (d|h|min|s|[KMG]iB)\b ?)+", "# ", line) for line in plain]


@pytest.mark.slow
@pytest.mark.published
def test_outputs_are_printed(tmp_path: Path) -> None:
    """Each command of the README prints the lines shown below it, except numbers."""
    script = writer()
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = script.blocks(page)
    printed = script.blocks(script.rewritten(page, tmp_path))

    assert shown
    for (command, old), (same, new) in zip(shown, printed, strict=True):
        assert (command, shape(old)) == (same, shape(new))
