"""`--json`: one object on standard output, with a schema that is generated from the classes of the reports."""

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from anybatch.cli.command import json_target
from anybatch.cli.main import VERBS, main
from anybatch.cli.status import Status
from anybatch_guide.demo import run as demonstration
from tests.architecture.source_tree import PACKAGE, ROOT
from tests.cli.small import SPEC

SCHEMA = json.loads((PACKAGE / "cli" / "schema.json").read_text(encoding="utf-8"))
UNENDING = {"guide", "watch", "mcp", "completion"}  # or without a report
MEASURED = f"{SPEC} --effective-batch-size 8 --micro-batch-size 2"
LOOP = """
import torch

def train(model, loader, optimizer, accumulation_steps):
    for inputs, labels in loader:
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
COMMANDS = {
    f"train {SPEC} --steps 8 --out run": Status.DONE,
    "spikes run": Status.DONE,
    "trace run": Status.DONE,
    "advise --log run": Status.USAGE,
    f"plan {SPEC} --device 1GiB --effective-batch-size 8 --fit --verify": Status.USAGE,
    f"plan {SPEC} --device cpu:1GiB --effective-batch-size 8 --verify": Status.DONE,
    f"check {SPEC} --samples 5": Status.DONE,
    "check --loop loop.py:train --ranks 1": Status.NOT_EXACT,
    f"tune {MEASURED}": Status.DONE,
    f"compare {MEASURED} --devices 1 --seconds 0.1": Status.DONE,
    f"scale {SPEC} --forecast 4 --link 1Gbit,1ms --micro-batch-size 4 --effective-batch-size 8": Status.DONE,
    f"advise {SPEC} --steps 30": Status.DONE,
    f"memory {SPEC} --limit 1GiB": Status.DONE,
    "init fresh.py": Status.DONE,
    "env": Status.DONE,
    "demo": Status.UNEXPECTED,
}
"""Command -> exit status; `demo` makes one step instead of five, which is not as intended."""
FAULTY = """
import os, signal
from tests.cli.small import job as small

def fail():
    if os.environ["RANK"] == "1":
        {fault}

def job():
    return small(fail)
"""
FAULTS = {
    "os.kill(os.getpid(), signal.SIGKILL)": (Status.RANKS, "ranks", "rank 1 was killed"),
    "1 / 0": (Status.UNEXPECTED, "unexpected", "ZeroDivisionError"),
}


def valid(text: str, verb: str) -> dict[str, Any]:
    """Return the object in a text, and check that it fits the schema of a command, or of errors."""
    values: dict[str, Any] = json.loads(text)
    definition = "error" if "error" in values else verb
    jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{definition}"}]}).validate(values)
    assert values["verb"] == verb
    return values


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a temporary folder with a loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    monkeypatch.setattr(demonstration, "NUM_STEPS", 1)
    monkeypatch.setattr(demonstration, "BATCH_SIZE", 1)
    return tmp_path


def test_the_committed_schema_is_the_generated_one() -> None:
    """The schema has the classes of today, each with a description, and every command that ends."""
    generated = runpy.run_path(str(ROOT / "docs" / "write_schema.py"))["results_schema"]()
    assert generated == SCHEMA, "run python docs/write_schema.py"
    names = {verb.name for verb in VERBS} - UNENDING
    assert names == {branch["$ref"].rpartition("/")[2] for branch in SCHEMA["oneOf"]} - {"error"}
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("folder")
def test_every_command_fits_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, standard output is one object that fits the schema, and contains the exit status."""
    for command, status in COMMANDS.items():
        words = command.split()
        assert main([*words, "--json", "--quiet"]) == status, command
        assert valid(capsys.readouterr().out, words[0])["status"] == status
    assert {command.split()[0] for command in COMMANDS} | UNENDING == {verb.name for verb in VERBS}


ERRORS = {
    "trian": (Status.USAGE, "unknown_command"),
    "init loop.py": (Status.USAGE, "usage"),
    "spikes missing": (Status.USAGE, "no_log"),
    f"train {SPEC} --lr 1": (Status.USAGE, "usage"),
    f"train {SPEC} --steps 0": (Status.USAGE, "usage"),
    "check --loop loop.py:missing": (Status.USAGE, "no_function"),
    "check divides_by_zero.py": (Status.UNEXPECTED, "unexpected"),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ERRORS)
def test_errors_are_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An error is an object too, with a code and the exit status, and still a sentence on standard error."""
    Path("divides_by_zero.py").write_text("def job(): 1 / 0\n", encoding="utf-8")
    status, code = ERRORS[command]
    words = command.split()
    assert main([*words, "--json"]) == status
    out, err = capsys.readouterr()
    values = valid(out, words[0])
    assert (values["status"], values["error"]["code"]) == (status, code)
    assert values["error"]["message"].splitlines()[0] in err


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("fault", FAULTS)
def test_failed_ranks_are_json(fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With several ranks, the launcher writes the only object, with the error of the rank that failed."""
    status, code, message = FAULTS[fault]
    Path("faulty.py").write_text(FAULTY.format(fault=fault), encoding="utf-8")
    assert main(["train", "faulty.py", "--ranks", "2", "--out", "run", "--json", "--quiet"]) == status
    error = valid(capfd.readouterr().out, "train")["error"]
    assert error["code"] == code
    assert message in error["message"]


@pytest.mark.usefixtures("folder")
def test_json_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """With a file, the text is still printed, and the file has the object; a recipe is not taken for a file."""
    assert main(["env", "--json", "found/env.json"]) == Status.DONE
    assert "wrote found/env.json" in capsys.readouterr().out
    assert "torch" in valid(Path("found/env.json").read_text(encoding="utf-8"), "env")["software"]
    assert main(["tune", "--json", "digits"]) == Status.USAGE
    assert "'digits' does not end in .json" in valid(capsys.readouterr().out, "tune")["error"]["message"]
    assert json_target(["env", "--json=a.json"]) == Path("a.json")
