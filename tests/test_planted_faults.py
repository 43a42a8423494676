"""The declared faults are up to date: their text is in the source, and their tests exist."""

import ast
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, functions, parse
from tests.faults import Fault, StaleFaultError, faulty, read_faults
from tests.planted_faults import copy_project, plant, stale, unseen

MAX_FAULTS = 150
"""Faults quote source text, so each one makes the source harder to change."""


@pytest.fixture(scope="module")
def faults() -> tuple[Fault, ...]:
    """All faults; read when they are needed, since that takes a second and every process collects these tests."""
    return read_faults(ROOT)


@pytest.mark.slow
def test_faults_can_be_planted(faults: tuple[Fault, ...]) -> None:
    """There are at most 150 faults; each replaces a text that occurs once, and the result is valid Python."""
    assert 0 < len(faults) <= MAX_FAULTS
    assert stale(faults) == []
    for fault in faults:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        changed = faulty(source, fault)
        assert changed != source, fault.place
        ast.parse(changed, fault.place)


@pytest.mark.slow
def test_the_tests_of_faults_are_there(faults: tuple[Fault, ...]) -> None:
    """Every test that must detect a fault exists in its file."""
    names = {test.partition("[")[0] for fault in faults for test in fault.tests}
    paths = {name.partition("::")[0] for name in names}
    there = {f"{path}::{function.name}" for path in paths for function in functions(parse(ROOT / path))}

    assert sorted(names - there) == []


@pytest.mark.slow
def test_faults_have_names_of_their_own(faults: tuple[Fault, ...]) -> None:
    """Names of faults are unique, so that the output is unambiguous."""
    assert len({fault.name for fault in faults}) == len(faults)


def test_faults_are_read_from_the_sources(tmp_path: Path) -> None:
    """A fault is read from its decorator, without the leading line break of a long text."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(
        '@sees("one", "a.py", """\\nx = 1\\n""", "", cases=["2", "3"], also=["tests/test_b.py::test_c"])\n'
        '@sees("two", "a.py", "y", "z")\n'
        "def test_it(): ...\n",
        encoding="utf-8",
    )
    one, two = read_faults(tmp_path)

    assert (one.old, one.new, one.place) == ("x = 1\n", "", "tests/test_some.py:1")
    assert one.tests == ("tests/test_some.py::test_it[2]", "tests/test_some.py::test_it[3]", "tests/test_b.py::test_c")
    assert (two.name, two.tests) == ("two", ("tests/test_some.py::test_it",))


def test_a_stale_fault_is_refused(tmp_path: Path) -> None:
    """A text that does not occur, or occurs twice, is not replaced."""
    (tmp_path / "some.py").write_text("x = 1\nx = 1\ny = 2\n", encoding="utf-8")
    for old in ("x = 1", "z"):
        with pytest.raises(StaleFaultError):
            plant(Fault(name="stale", file="some.py", old=old, new="", tests=()), tmp_path)
    plant(Fault(name="fresh", file="some.py", old="y = 2", new="y = 3", tests=()), tmp_path)

    assert (tmp_path / "some.py").read_text(encoding="utf-8") == "x = 1\nx = 1\ny = 3\n"


def test_a_stale_fault_is_looked_for_elsewhere(faults: tuple[Fault, ...]) -> None:
    """If a fault's text moved to another file, that file is reported."""
    moved = Fault(name="moved", file="src/anybatch/errors.py", old=faults[0].old, new="", tests=())
    (said,) = stale([moved])

    assert f"It stands in ['{faults[0].file}']" in said


def test_a_test_that_passes_has_not_seen_its_fault() -> None:
    """Only failed tests detect a fault; a test without parameters does if any of its cases failed."""
    failed = {"tests/a.py::test_one[2]", "tests/a.py::test_two"}

    assert unseen(["tests/a.py::test_one", "tests/a.py::test_one[2]", "tests/a.py::test_two"], failed) == []
    assert unseen(["tests/a.py::test_one[3]", "tests/b.py::test_two"], failed) == [
        "tests/a.py::test_one[3]",
        "tests/b.py::test_two",
    ]
    assert unseen(["tests/a.py::test_two"], set()) == ["tests/a.py::test_two"]


def test_a_copy_is_a_project_of_its_own(tmp_path: Path, faults: tuple[Fault, ...]) -> None:
    """Faults are planted in the copy, and the project is unchanged."""
    fault = faults[0]
    before = (ROOT / fault.file).read_bytes()
    copy_project(tmp_path)
    plant(fault, tmp_path)

    assert (ROOT / fault.file).read_bytes() == before
    assert (tmp_path / fault.file).read_bytes() != before
