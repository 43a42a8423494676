"""The declared faults are up to date: their text is in the source, and their tests exist."""

import ast
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, functions, parse
from tests.faults import Fault, StaleFaultError, faulty, read_faults
from tests.planted_faults import plant, stale

MAX_FAULTS = 150
"""Faults quote source text, so each one makes the source harder to change."""


@pytest.fixture(scope="module")
def faults() -> tuple[Fault, ...]:
    """All faults; read when they are needed, since that takes a second and every process collects these tests."""
    return read_faults(ROOT)


@pytest.mark.slow
def test_faults_can_be_planted(faults: tuple[Fault, ...]) -> None:
    """There are at most 150 faults, named differently; each replaces a text that occurs once, with valid Python."""
    assert 0 < len(faults) <= MAX_FAULTS
    assert stale(faults) == []
    for fault in faults:
        source = (ROOT / fault.file).read_text(encoding="utf-8")
        changed = faulty(source, fault)
        assert changed != source, fault.place
        ast.parse(changed, fault.place)
    assert len({fault.name for fault in faults}) == len(faults)


@pytest.mark.slow
def test_the_tests_of_faults_are_there(faults: tuple[Fault, ...]) -> None:
    """Every test that must detect a fault exists in its file."""
    names = {test.partition("[")[0] for fault in faults for test in fault.tests}
    paths = {name.partition("::")[0] for name in names}
    there = {f"{path}::{function.name}" for path in paths for function in functions(parse(ROOT / path))}

    assert sorted(names - there) == []


def test_a_stale_fault_is_refused(tmp_path: Path) -> None:
    """A text that does not occur, or occurs twice, is not replaced."""
    (tmp_path / "some.py").write_text("x = 1\nx = 1\ny = 2\n", encoding="utf-8")
    for old in ("x = 1", "z"):
        with pytest.raises(StaleFaultError):
            plant(Fault(name="stale", file="some.py", old=old, new="", tests=()), tmp_path)
    plant(Fault(name="fresh", file="some.py", old="y = 2", new="y = 3", tests=()), tmp_path)

    assert (tmp_path / "some.py").read_text(encoding="utf-8") == "x = 1\nx = 1\ny = 3\n"
