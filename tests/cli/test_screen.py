"""The terminal output of commands, above all of `anybatch train`, and the files at its end."""

import io
import re
import sys
from pathlib import Path

import pytest

from anybatch.cli.command import progress_line
from anybatch.cli.launch import ConsoleFilter
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.core.records import PhaseRecord
from anybatch.errors import UserError
from anybatch.events.console import Console
from anybatch.recipes.run_folder import RunFolder
from tests.cli.small import SPEC

PLOT = "pip install 'anybatch[plot]'"
TENSORBOARD = "pip install 'anybatch[tensorboard]'"


def shown(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, str], str]:
    """Train for three steps; return the summary by label, and the standard error output."""
    assert main(["train", SPEC, "--steps", "3", "--out", str(folder), *options]) == Status.DONE
    printed = capsys.readouterr()
    names = [line.split("  ", 1)[0] for line in printed.out.splitlines()]
    return dict(zip(names, [line[13:] for line in printed.out.splitlines()], strict=True)), printed.err


@pytest.mark.slow
def test_summary_lists_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary lists every file of a run, except its lock, and all listed files exist."""
    summary, _ = shown(tmp_path / "run", capsys)
    named = {Path(word) for text in summary.values() for word in re.findall(rf"{tmp_path}[^\s,]*", text)}
    named.remove(tmp_path / "run")  # by the command to continue
    lock = RunFolder(tmp_path / "run").lock
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path != lock]

    assert all(path.exists() for path in named)
    newest_only = [path for path in files if "checkpoints" not in path.parts]
    assert all(path in named or named & {*path.parents} for path in newest_only)
    assert {path.suffix for path in named} >= {".json", ".jsonl", ".png", ".svg"}
    assert any(path.is_relative_to(tmp_path / "run" / "checkpoints") for path in named)


@pytest.mark.slow
def test_banner_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the first step the folder, geometry, device, precision, learning rate and rule are printed."""
    _, said = shown(tmp_path / "run", capsys, "--micro-batch-size", "3", "--effective-batch-size", "16")
    banner = said[: said.index("step 1 of 3")]

    assert banner.splitlines()[0] == f"run in {tmp_path / 'run'}: log events.jsonl, checkpoints in checkpoints/"
    assert "16 samples = 1 rank x 6 micro-batches x 3, ragged" in banner
    for words in ("precision fp32", "41 parameters of float64", "learning rate: lr", "sqrt", "strategy single"):
        assert words in banner
    assert re.search(r"step 3 of 3   loss .* gradient norm .* samples/s .* memory .* left +0\.0 s", said)


def test_missing_extras_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib and TensorBoard the run is the same, and each is reported in one line with its pip command."""

    def no_charts(_: object) -> None:
        message = f"there is no tensorboard. Install it: {TENSORBOARD}"
        raise UserError(message)

    monkeypatch.setattr("anybatch.cli.launch.TensorBoardLog", no_charts)
    monkeypatch.setitem(__import__("sys").modules, "anybatch.events.drawing", None)
    summary, _ = shown(tmp_path / "run", capsys)

    assert summary["plot"].endswith(PLOT)
    assert summary["tensorboard"].endswith(TENSORBOARD)
    assert not [*(tmp_path / "run").glob("losses.*"), *(tmp_path / "run").glob("tensorboard")]


def test_picture_that_fails_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that cannot be drawn, for any reason, is reported in the summary of a finished run."""

    def fail(*_: object) -> None:
        message = "no\nfonts"
        raise RuntimeError(message)

    monkeypatch.setattr("anybatch.cli.launch.plot_losses", fail)
    summary, _ = shown(tmp_path / "run", capsys)

    assert summary["plot"] == "not drawn, because of RuntimeError: no fonts"


def test_stop_is_told_above_the_bar() -> None:
    """On a terminal the stop request is reported once, and not before it was made."""
    stream = io.StringIO()
    asked = [False]
    screen = ConsoleFilter(Console(3, stream=stream), lambda: asked[0])
    record = PhaseRecord(rank=0, step=0, name="update", event="begin", position=None)
    screen.observe(record)
    assert "stopping after this step" not in stream.getvalue()

    asked[0] = True
    screen.observe(record)
    screen.observe(record)
    assert stream.getvalue().count("stopping after this step and saving") == 1


class Terminal(io.StringIO):
    """An error stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def last_line(text: str) -> str:
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
            assert last_line(terminal.getvalue()) == words[:79]
    assert last_line(terminal.getvalue()) == ""
