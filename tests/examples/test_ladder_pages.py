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


def test_outputs_are_written_into_their_blocks() -> None:
    """Only the given programs' blocks are replaced, as a whole; the rest of the page stays."""
    blocks = [f"### {name}.py\n\nWords.\n\n```text\n{name} \\1\n```\n" for name in ("01_a", "02_b")]
    page = "# Title\n\n" + "\n".join(blocks) + "\n```text\nnot a program's\n```\n"

    assert OUTPUTS.shown(page) == {"01_a.py": "01_a \\1\n", "02_b.py": "02_b \\1\n"}
    assert OUTPUTS.with_outputs(page, {"02_b.py": "new \\2\nlines\n"}) == page.replace("02_b \\1\n", "new \\2\nlines\n")
    assert OUTPUTS.with_outputs(page, {}) == page


def test_differences_are_seen() -> None:
    """A different word, line or number is detected; digests and rounding errors may differ."""
    shown = "digests f1637ff9 a8724e8d, error 1.3e-16, 28,936 bytes"

    assert shape_and_numbers("digests 12345678 0a0b0c0d, error 9.9e-17, 28,936 bytes") == shape_and_numbers(shown)
    assert shape_and_numbers("digests f1637ff9 a8724e8d, error 1.3e-02, 28,936 bytes") != shape_and_numbers(shown)
    assert shape_and_numbers("digest f1637ff9 a8724e8d, error 1.3e-16, 28,936 bytes") != shape_and_numbers(shown)
    assert shape_and_numbers(shown + "\n") != shape_and_numbers(shown)
