"""The terminal output of commands, above all of `anybatch train`, and the files at its end."""

import re
import sys
from pathlib import Path

import pytest

from anybatch.cli.command import progress_line
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.errors import UserError
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
    assert re.match(r"peak \S+ [KMG]iB \(resident memory of the rank 0 process\)", summary["memory"])
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


def test_charts_that_fail_do_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without matplotlib, TensorBoard or fonts the run is the same, and each is reported in one line."""

    def no_charts(_: object) -> None:
        message = f"there is no tensorboard. Install it: {TENSORBOARD}"
        raise UserError(message)

    def fail(*_: object) -> None:
        message = "no\nfonts"
        raise RuntimeError(message)

    monkeypatch.setattr("anybatch.cli.launch.TensorBoardLog", no_charts)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    summary, _ = shown(tmp_path / "run", capsys)
    assert summary["plot"].endswith(PLOT)
    assert summary["tensorboard"].endswith(TENSORBOARD)
    assert not [*(tmp_path / "run").glob("losses.*"), *(tmp_path / "run").glob("tensorboard")]

    monkeypatch.setattr("anybatch.cli.launch.plot_losses", fail)
    summary, _ = shown(tmp_path / "again", capsys)
    assert summary["plot"] == "not drawn, because of RuntimeError: no fonts"


def test_progress_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal a new line replaces the one before, cut to the width, and the line is cleared at the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_line(quiet=False) as tell:
        assert tell is not None
        for words in ("steps of the longest kind", "steps", "s" * 200):
            tell(words)
            assert capsys.readouterr().err == f"\r{words[:79]:<79}\r"
    assert capsys.readouterr().err.isspace()
