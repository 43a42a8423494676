"""The table of planted faults is up to date: what it replaces is in the source, and its tests are there."""

import ast
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, functions, parse
from tests.planted_faults import PAGE, Fault, StaleFaultError, copy_project, faults, page, plant, unseen

FAULTS = {fault.name: fault for fault in faults()}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there_once(name: str) -> None:
    """The text stands in its file exactly once, and the file with the fault in it is still Python."""
    fault = FAULTS[name]
    source = (ROOT / fault.file).read_text(encoding="utf-8")

    assert source.count(fault.old) == 1
    changed = source.replace(fault.old, fault.new)
    assert changed != source
    ast.parse(changed)


def test_the_tests_of_faults_are_there() -> None:
    """Every fault has a test that is to see it, and every such test is a function of its file."""
    names = {test.partition("[")[0] for fault in FAULTS.values() for test in fault.tests}
    paths = {name.partition("::")[0] for name in names}
    there = {f"{path}::{function.name}" for path in paths for function in functions(parse(ROOT / path))}

    assert [fault.name for fault in FAULTS.values() if not fault.tests] == []
    assert sorted(names - there) == []


def test_faults_have_names_of_their_own() -> None:
    """No two faults are called alike: the page would not say which is which."""
    assert len(FAULTS) == len(faults())


def test_the_page_is_the_table() -> None:
    """The page in the docs, written when all faults were seen, shows the table as it is."""
    assert PAGE.read_text(encoding="utf-8") == page(faults())


def test_a_stale_fault_is_refused(tmp_path: Path) -> None:
    """A text that stands nowhere, or twice, is not replaced."""
    (tmp_path / "some.py").write_text("x = 1\nx = 1\ny = 2\n", encoding="utf-8")
    for old in ("x = 1", "z"):
        with pytest.raises(StaleFaultError):
            plant(Fault(name="stale", file="some.py", old=old, new="", tests=()), tmp_path)
    plant(Fault(name="fresh", file="some.py", old="y = 2", new="y = 3", tests=()), tmp_path)

    assert (tmp_path / "some.py").read_text(encoding="utf-8") == "x = 1\nx = 1\ny = 3\n"


def test_a_test_that_passes_has_not_seen_its_fault() -> None:
    """Only tests that failed have seen it; one without parameters has if any of its cases failed."""
    failed = {"tests/a.py::test_one[2]", "tests/a.py::test_two"}

    assert unseen(["tests/a.py::test_one", "tests/a.py::test_one[2]", "tests/a.py::test_two"], failed) == []
    assert unseen(["tests/a.py::test_one[3]", "tests/b.py::test_two"], failed) == [
        "tests/a.py::test_one[3]",
        "tests/b.py::test_two",
    ]
    assert unseen(["tests/a.py::test_two"], set()) == ["tests/a.py::test_two"]


def test_a_copy_is_a_project_of_its_own(tmp_path: Path) -> None:
    """What is planted goes into the copy; the project stays as it is."""
    fault = faults()[0]
    before = (ROOT / fault.file).read_bytes()
    copy_project(tmp_path)
    plant(fault, tmp_path)

    assert (ROOT / fault.file).read_bytes() == before
    assert (tmp_path / fault.file).read_bytes() != before
