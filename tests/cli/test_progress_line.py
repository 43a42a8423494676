"""The terminal line on which commands show their progress."""

import io
import sys

import pytest

from anybatch.cli.command import progress_line
from anybatch.errors import UserError


class Terminal(io.StringIO):
    """An error stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def shown(text: str) -> str:
    """Return the terminal's last line after this text."""
    line = ""
    for part in text.split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


def test_each_line_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new line replaces the previous one completely, an overlong one is cut, and the line is cleared at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line() as tell:
        assert tell is not None
        for words in ("steps of the longest kind", "steps", "s" * 200):
            tell(words)
            assert shown(terminal.getvalue()) == words[:79]
    assert shown(terminal.getvalue()) == ""


def measured_in_vain() -> None:
    """Report progress, and fail."""
    with progress_line() as tell:
        assert tell is not None
        tell("measuring")
        raise UserError


def test_an_error_finds_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the meantime is printed on a separate line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(UserError):
        measured_in_vain()
    assert "measuring" in terminal.getvalue()
    assert shown(terminal.getvalue()) == ""
