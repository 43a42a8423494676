"""Invalid command lines end with one sentence and their own exit status, and never with a traceback."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from anybatch.cli.main import main
from anybatch.cli.status import Status
from tests.cli.small import SPEC

RECIPE_VERBS = ("train", "check", "tune", "compare", "scale", "advise", "memory")
FILE_VERBS = ("spikes {}", "trace {}", "advise --log {}", "watch {} --export page.html")
MISSING = ("missing", "folder", "folder/events.jsonl", "file/events.jsonl")
NOT_LOGS = ("file", "binary", "empty")
OUTPUTS = ("folder", "file/below", "")
PICTURES = ("folder", "file/below.png", "picture.xyz", "")
PLAN = "plan gpt2 --device H100 --effective-batch-size 8"
REPORT_VERBS = ("compare digits", "scale digits", "advise digits")

WRONG_COMMANDS = (
    "trian",
    "help trian",
    "env --no-such-option",
    "env extra",
    *(f"{verb} no_such_recipe" for verb in RECIPE_VERBS if verb != "compare"),
    *(f"{verb} no_such_recipe.py" for verb in RECIPE_VERBS),
    *(f"{verb} digits --effective-batch-size {size}" for verb in ("train", "tune") for size in ("-1", "0", "nan", "x")),
    *(verb.format(path) for verb in FILE_VERBS for path in MISSING),
    *(verb.format(path) for verb in FILE_VERBS[:3] for path in NOT_LOGS if verb != "trace {}"),
    *(f"{verb} --json {shlex.quote(path)}" for verb in REPORT_VERBS for path in OUTPUTS),
    *(f"{verb} --figure {shlex.quote(path)}" for verb in (*REPORT_VERBS[:2], PLAN) for path in PICTURES),
    "check --loop missing.py:train",
    "check --loop file:train",
    "train digits --out file",
    "train digits --out file/below",
    "train --resume",
    "init folder",
    "init file",
    "init file/below.py",
    "watch --page missing",
    "watch missing --export page.html",
    "guide --page missing --no-browser",
    "guide export file",
    "guide export --single-file folder",
    "guide record no_such_experiment",
    "plan gpt3 --device H100",
    "plan gpt2 --device H100",
    "plan missing.json --device H100 --effective-batch-size 8",
    "plan binary.json --device H100 --effective-batch-size 8",
    "plan list.json --device H100 --effective-batch-size 8",
    f"{PLAN} --devices missing",
    f"{PLAN} --devices binary.json",
    f"{PLAN} --headroom 2",
    f"{PLAN} --lora -1",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with files that commands cannot use."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("not a log\n")
    (tmp_path / "empty").touch()
    (tmp_path / "list.json").write_text("[1]")
    for name in ("binary", "binary.json"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00\x01\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_wrong_commands_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command has a status other than 0 and 1, and a message without a traceback."""
    statuses, printed = {}, {}
    for command in WRONG_COMMANDS:
        statuses[command] = main(shlex.split(command))
        printed[command] = capsys.readouterr().err
    usage = {command: status for command, status in statuses.items() if status != Status.USAGE}
    assert usage == {}
    assert [command for command, text in printed.items() if "Traceback" in text or "bug in anybatch" in text] == []
    assert [command for command, text in printed.items() if not text.startswith("anybatch")] == []


def test_a_missing_file_of_the_recipe_is_shown_with_its_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the user's own code cannot open a file, that is not a usage error, and the message shows the user's line."""
    (folder / "reads.py").write_text(
        "import anybatch as ab\n\n\ndef job() -> ab.Job:\n    open('no_such_data')\n    raise AssertionError\n"
    )
    assert main(["check", "reads.py"]) == Status.UNEXPECTED
    assert "reads.py" in (printed := capsys.readouterr().err)
    assert "bug in anybatch" not in printed


def run_into(target: int, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with its output in a file descriptor."""
    command = [sys.executable, "-m", "anybatch", *words]
    return subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True, cwd=folder, check=False)  # noqa: S603 (a fixed program)


@pytest.mark.slow
def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A command ends quietly if its output is closed, as by `| head`; a full disk is an error of one line."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = run_into(writer, ["train", SPEC, "--steps", "1", "--out", str(tmp_path / "run")], Path.cwd())
    finally:
        os.close(writer)
    assert done.returncode == Status.CLOSED_PIPE
    assert "Error" not in done.stderr
    assert "bug in anybatch" not in done.stderr

    if Path("/dev/full").exists():
        full = os.open("/dev/full", os.O_WRONLY)
        try:
            done = run_into(full, ["--help"], tmp_path)
        finally:
            os.close(full)
        assert done.returncode == Status.FILES
        assert len(done.stderr.splitlines()) == 1
