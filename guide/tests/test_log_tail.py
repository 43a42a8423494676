"""Reading a growing log returns each complete line once, without overlong ones."""

from pathlib import Path

import pytest

from anybatch.events.log_lines import decoded_line
from anybatch_guide.watch.log_tail import MAX_LINE_BYTES, LogTail


def appended(path: Path, content: bytes) -> None:
    """Append to a file."""
    with path.open("ab") as file:
        file.write(content)


def test_overlong_lines_are_skipped(tmp_path: Path) -> None:
    """An overlong line is counted once and never buffered, also if it arrives in pieces; other lines are kept."""
    path, tail, found = tmp_path / "log", LogTail(tmp_path / "log"), []
    path.write_bytes(b"before\n")
    for _ in range(5):
        appended(path, b"x" * MAX_LINE_BYTES)
        for _ in range(3):
            found += tail.read(2 * MAX_LINE_BYTES)
    appended(path, b"end\nafter\n" + b"y" * (MAX_LINE_BYTES + 1) + b"\nlast\n")
    for _ in range(4):
        found += tail.read(2 * MAX_LINE_BYTES)

    assert found == [b"before", b"after", b"last"]
    assert tail.num_too_long == 2


def test_a_replaced_file_is_read_from_the_start(tmp_path: Path) -> None:
    """A file that is shorter or starts differently is read again; removing an unfinished end changes nothing."""
    path, tail = tmp_path / "log", LogTail(tmp_path / "log")
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.read(MAX_LINE_BYTES) == [b"one", b"two"]
    path.write_bytes(b"one\ntwo\n3\n")
    assert tail.read(MAX_LINE_BYTES) == [b"3"]
    assert tail.generation == 0
    path.write_bytes(b"uno\ndue\ntre\nquattro\n")
    assert tail.read(MAX_LINE_BYTES) == [b"uno", b"due", b"tre", b"quattro"]
    path.write_bytes(b"un\n")
    assert tail.read(MAX_LINE_BYTES) == [b"un"]
    assert tail.generation == 2


def test_a_path_without_a_file_has_no_lines(tmp_path: Path) -> None:
    """A missing file and a folder have no lines."""
    assert LogTail(tmp_path / "none").read(MAX_LINE_BYTES) == []
    assert LogTail(tmp_path).read(MAX_LINE_BYTES) == []


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b'{"version":2}', b"[" * 100_000, b"9" * 5000])
def test_invalid_lines(text: bytes) -> None:
    """Text that is not an object of a known version is not a line."""
    assert decoded_line(text) is None
