"""The traces of the walk-through, compared with the files and with the programs' output."""

import ast
from pathlib import Path
from typing import Any

import pytest

from anybatch_guide.experiments import walks as recorded_walks
from anybatch_guide.tracing import TracedFile, trace_program
from guide.tests.recorded_again import recording
from tests.architecture.source_tree import ROOT

PROGRAM = '''"""A program."""


def add(numbers):
    total = 0
    for number in numbers:
        total += number
    return total


if __name__ == "__main__":
    print(add([1, 2, 3]))
'''


def statements(path: Path) -> set[int]:
    """Return the executable lines of a file."""
    return {node.lineno for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "lineno")}


def say_nothing(_line: object) -> None:
    """Take a line and do nothing."""


@pytest.fixture
def program(tmp_path: Path) -> TracedFile:
    """A small program as a file."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return TracedFile(path, "program.py")


@pytest.mark.slow
def test_lines_are_in_execution_order(program: TracedFile) -> None:
    """The trace has the lines in execution order, and the output; a line that ran often can be left out."""
    found, shorter = trace_program([program]), trace_program([program], repeats=2)

    assert found["lines"] == [12, 5, 6, 7, 6, 7, 6, 7, 6, 8]
    assert found["output"] == "6\n"
    assert found["skipped"] == []
    assert (shorter["lines"], shorter["skipped"]) == ([12, 5, 6, 7, 6, 7, 8], [[6, 3]])


@pytest.fixture(scope="module")
def walks() -> dict[str, Any]:
    """The traces on one rank, shared by all tests."""
    return {
        "plain": recorded_walks.trace_plain(say_nothing),
        "anybatch": recorded_walks.trace_anybatch(say_nothing),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "anybatch"])
def test_walks_match_the_files(name: str, walks: dict[str, Any]) -> None:
    """All traced lines are executable lines of the current file and equal the recording, with three updates."""
    found, recorded = walks[name], recorded_traces()[name]
    file_of = found["file_of"] or [0] * len(found["lines"])

    paths = [ROOT / file["path"] for file in found["files"]]
    assert [TracedFile(path, "").digest for path in paths] == [file["sha256"] for file in found["files"]]
    assert all(line in statements(paths[file]) for file, line in zip(file_of, found["lines"], strict=True))
    assert (found["lines"], found["file_of"]) == (recorded["lines"], recorded["file_of"])
    assert found["values"]["updates"][-1][1] == 3
    assert found["output"].count("\n") == 3


@pytest.mark.slow
@pytest.mark.published
def test_walks_print_the_same(walks: dict[str, Any]) -> None:
    """Plain PyTorch, anybatch and DDP on two ranks have the same losses and norms to twelve digits."""
    plain, ours, ddp = walks["plain"], walks["anybatch"], recorded_walks.trace_ddp(say_nothing)

    assert plain["output"] == ours["output"] == ddp["output"]
    assert ddp["values"]["updates"][-1][1] == 3
    assert max(value for _, value in ddp["values"]["micro_batches"]) == 2


def recorded_traces() -> dict[str, Any]:
    """Return all recorded traces by name."""
    walks = {name: recording(f"walk_{name}")["data"] for name in ("plain", "ddp", "anybatch")}
    return {**walks, **recording("walk_ladder")["data"]["programs"]}


@pytest.mark.parametrize("name", sorted(recorded_traces()))
@pytest.mark.slow
@pytest.mark.published
def test_recorded_lines_match_the_files(name: str) -> None:
    """The recorded traces match the current files: their text, and executable lines."""
    trace = recorded_traces()[name]
    file_of = trace["file_of"] or [0] * len(trace["lines"])
    paths = [ROOT / file["path"] for file in trace["files"]]

    assert [TracedFile(path, "").digest for path in paths] == [file["sha256"] for file in trace["files"]], (
        f"record it again: anybatch guide record walk_{name if '_' not in name else 'ladder'}"
    )
    assert [path.read_text(encoding="utf-8") for path in paths] == [file["text"] for file in trace["files"]]
    assert all(line in statements(paths[file]) for file, line in zip(file_of, trace["lines"], strict=True))
