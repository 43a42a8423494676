"""The ladder's programs are short, self-contained, and print the outputs shown in the README."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.ladder import LADDER, PROGRAMS, module_at

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
OUTPUTS = module_at(LADDER / "write_outputs.py")


def by_name(path: Path) -> str:
    """Return the test id of a program."""
    return path.stem


@pytest.mark.parametrize("path", PROGRAMS, ids=by_name)
def test_program_is_a_page(path: Path) -> None:
    """A program has at most 60 lines of 100 characters, a short docstring, and imports only torch and the stdlib."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    imported = {name.partition(".")[0] for name in re.findall(r"^(?:import|from) ([\w.]+)", source, flags=re.MULTILINE)}

    assert len(source.splitlines()) <= 60
    assert max(map(len, source.splitlines())) <= 100
    assert ast.get_docstring(tree)
    assert 3 <= (tree.body[0].end_lineno or 0) <= 7
    assert imported <= {"torch", *sys.stdlib_module_names}


def shape_and_numbers(text: str) -> tuple[list[str], list[float]]:
    """Return the lines with marks instead of numbers, and the numbers, ignoring digests and rounding errors."""
    text = re.sub(r"\b(?=\w*[a-f])(?=\w*\d)[0-9a-f]{8}\b|\b\d{8}\b", "DIGEST", text)
    numbers = [float(number.replace(",", "")) for number in re.findall(NUMBER, text)]
    return re.sub(r" *" + NUMBER, " #", text).split("\n"), [0.0 if number < 1e-12 else number for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=by_name)
@pytest.mark.published
def test_program_prints_what_the_readme_shows(path: Path) -> None:
    """Each program runs and prints the output shown in the README."""
    done = subprocess.run(  # noqa: S603 (a program of ours)
        [sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    printed_text, printed = shape_and_numbers(done.stdout)
    shown_text, shown = shape_and_numbers(OUTPUTS.shown(OUTPUTS.PAGE.read_text(encoding="utf-8"))[path.name])

    assert printed_text == shown_text
    assert printed == pytest.approx(shown, rel=0.05)


def test_every_program_has_its_output_in_the_readme() -> None:
    """The README has one block for each program, in order."""
    assert list(OUTPUTS.shown(OUTPUTS.PAGE.read_text(encoding="utf-8"))) == [path.name for path in PROGRAMS]
