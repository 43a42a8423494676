"""The line of the terminal on which verbs say what they measure."""

import io
import sys

import pytest

from anybatch.cli.progress_line import progress_line
from anybatch.errors import UserError


class Terminal(io.StringIO):
    """An error stream that is a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""
        return True


def shown(text: str) -> str:
    """Return what a terminal shows in its last line after this text."""
    line = ""
    for part in text.split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


def test_each_line_takes_the_place_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter one leaves nothing of a longer one, one that is too long is cut, and nothing is left at the end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line() as tell:
        assert tell is not None
        for words in ("steps of the longest kind", "steps", "s" * 200):
            tell(words)
            assert shown(terminal.getvalue()) == words[:79]
    assert shown(terminal.getvalue()) == ""


def measured_in_vain() -> None:
    """Say what is measured, and fail."""
    with progress_line() as tell:
        assert tell is not None
        tell("measuring")
        raise UserError


def test_an_error_finds_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised meanwhile is printed by itself, not over the rest of a line."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(UserError):
        measured_in_vain()
    assert "measuring" in terminal.getvalue()
    assert shown(terminal.getvalue()) == ""


def test_without_a_terminal_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A log file or a pipe gets the report alone."""
    with progress_line() as tell:
        assert tell is None
    assert capsys.readouterr() == ("", "")
