"""Reading a growing log returns each complete line once, without overlong ones."""

import random
from pathlib import Path

import pytest

from anybatch.events.log_lines import MOST_LINE_BYTES, LogTail, decoded_line


def appended(path: Path, content: bytes) -> None:
    """Append to a file."""
    with path.open("ab") as file:
        file.write(content)


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    """If a file grows in arbitrary pieces, its lines are returned in order, once each."""
    rng, path, tail = random.Random(0), tmp_path / "log", LogTail(tmp_path / "log")
    lines = [bytes(rng.choices(b"abc", k=rng.randint(0, 40))) for _ in range(200)]
    content, at, found = b"".join(line + b"\n" for line in lines) + b"unfinished", 0, []
    while at < len(content):
        size = rng.randint(1, 90)
        appended(path, content[at : at + size])
        at += size
        found += tail.read(MOST_LINE_BYTES)

    assert found == lines
    assert tail.offset == len(content) - len(b"unfinished")
    assert tail.has_unread_bytes
    assert tail.read(MOST_LINE_BYTES) == []


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    """An overlong line is counted once and never buffered, also if it arrives in pieces; other lines are kept."""
    path, tail, found = tmp_path / "log", LogTail(tmp_path / "log"), []
    path.write_bytes(b"before\n")
    for _ in range(5):
        appended(path, b"x" * MOST_LINE_BYTES)
        for _ in range(3):
            found += tail.read(2 * MOST_LINE_BYTES)
    appended(path, b"end\nafter\n" + b"y" * (MOST_LINE_BYTES + 1) + b"\nlast\n")
    for _ in range(4):
        found += tail.read(2 * MOST_LINE_BYTES)

    assert found == [b"before", b"after", b"last"]
    assert tail.num_too_long == 2


def test_another_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    """A file that is shorter or starts differently is read again; removing an unfinished end changes nothing."""
    path, tail = tmp_path / "log", LogTail(tmp_path / "log")
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.read(MOST_LINE_BYTES) == [b"one", b"two"]
    path.write_bytes(b"one\ntwo\n3\n")
    assert tail.read(MOST_LINE_BYTES) == [b"3"]
    assert tail.generation == 0
    path.write_bytes(b"uno\ndue\ntre\nquattro\n")
    assert tail.read(MOST_LINE_BYTES) == [b"uno", b"due", b"tre", b"quattro"]
    path.write_bytes(b"un\n")
    assert tail.read(MOST_LINE_BYTES) == [b"un"]
    assert tail.generation == 2


def test_what_is_no_file_has_no_lines(tmp_path: Path) -> None:
    """A missing file and a folder have no lines."""
    assert LogTail(tmp_path / "none").read(MOST_LINE_BYTES) == []
    assert LogTail(tmp_path).read(MOST_LINE_BYTES) == []


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b'{"version":2}', b"[" * 100_000, b"9" * 5000])
def test_what_is_no_line(text: bytes) -> None:
    """Text that is not an object of a known version is not a line."""
    assert decoded_line(text) is None
