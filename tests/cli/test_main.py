"""The command line: commands, options, other libraries' option names, exit statuses."""

import importlib.metadata
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from anybatch.cli import init, plan, train
from anybatch.cli.main import VERBS, function_of, main
from anybatch.cli.status import Status
from anybatch.cli.train import FOREIGN, OWN_OPTIONS, TrainRequest, explain_unknown, read_request
from anybatch.core.run_config import RunConfig
from anybatch.core.schedules import BatchRamp
from tests.architecture.source_tree import ROOT
from tests.cli.small import SPEC, logged

LIGHT = """
import os, sys
from anybatch.cli.main import main
for words in ([], ["--help"], ["nonsense"], ["train", "--help"], ["train", "--lr", "1"], ["init"]):
    main(words)
assert "torch" not in sys.modules
from anybatch.cli.command import let_threads_sleep
os.environ.pop("OMP_WAIT_POLICY", None)
let_threads_sleep()
assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
let_threads_sleep()
assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
"""

EXITS = """
import sys
import torch
from torch import nn
import anybatch as ab

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 3:
            sys.exit({code})
        return torch.ones(4), torch.zeros(1)

def job() -> ab.Job:
    return ab.Job(
        model=lambda: nn.Linear(4, 1),
        optimizer=torch.optim.SGD,
        loss=ab.mean_over_samples(lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])),
        dataset=Samples,
        defaults=ab.RunConfig(effective_batch_size=40, epochs=1, learning_rate=0.1),
    )
"""


def test_overview_lists_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Without arguments all commands are listed with their summaries, and each of them can be run."""
    assert main([]) == Status.DONE
    printed = capsys.readouterr().out
    for verb in VERBS:
        assert f"anybatch {verb.name}" in printed
        assert verb.summary in printed
        for words in ([verb.name, "--help"], ["help", verb.name]):
            assert main(words) == Status.DONE
            assert capsys.readouterr().out.startswith(f"usage: anybatch {verb.name}")


def test_a_command_of_a_missing_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If the package of a command is missing, the message has the command that installs it."""
    assert function_of(VERBS[[verb.name for verb in VERBS].index("guide")]).__module__ == "anybatch_guide.command"

    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    assert main(["guide"]) == Status.USAGE
    said = "anybatch: `anybatch guide` needs an extra: pip install 'anybatch[guide]'\n"
    assert capsys.readouterr().err == said


def test_torch_is_imported_late() -> None:
    """Help and option errors do not import torch, so that its thread settings can still be set."""
    done = subprocess.run(  # noqa: S603 (a fixed program)
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_statuses_are_documented() -> None:
    """docs/command_line.md has one line for each exit status, and for no others."""
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    section = text[text.index("## Exit statuses") :]
    documented = [int(number) for number in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)]
    assert documented == sorted(status.value for status in Status)


@pytest.mark.parametrize("verb", [train, plan], ids=["train", "plan"])
def test_options_are_documented(verb: ModuleType) -> None:
    """docs/command_line.md has exactly the options of the command; `train` has at most 18."""
    actions = [action for action in verb.make_parser()._actions if action.option_strings]  # noqa: SLF001
    options = [action.option_strings[-1] for action in actions if action.dest not in ("json", "quiet")]
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## `{verb.make_parser().prog}")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(--[a-z-]+)", section, flags=re.MULTILINE)
    assert sorted(options) == sorted(["--help", *documented])
    if verb is train:
        assert documented == [f"--{word}" for word in OWN_OPTIONS]
        assert len(documented) <= 18


def test_options_are_read() -> None:
    """Every option arrives under its name; omitted options are None."""
    request = read_request(
        ["x.py:f", "--ranks", "2", "--micro-batch-size", "auto", "--learning-rate", "1e-3", "--out", "a"]
    )
    config = RunConfig(micro_batch_size="auto", learning_rate=0.001)
    assert request == TrainRequest(recipe="x.py:f", folder=Path("a"), resume=None, ranks=2, config=config)
    ramp = BatchRamp((32, 20_000), (128, None))
    assert read_request(["--effective-batch-size", "32,128@20000"]).config == RunConfig(effective_batch_size=ramp)
    assert read_request([]) == TrainRequest(recipe=None, folder=None, resume=None, ranks=None, config=RunConfig())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--epochs 1 --steps 2", "contradict each other"),
        ("--epochs 0", "0 must be at least 1"),
        ("--effective-batch-size 32,128", "size@first_sample for each later stage, such as 32,128@20000"),
        ("--precision fp8", "invalid choice: 'fp8'"),
        ("--epoch 3", "Did you mean --epochs?"),
        ("--nothing-like-it", "Options: --effective-batch-size"),
        ("digits text", "Pass one recipe"),
        ("--resume", "--resume needs --out"),
        ("--resume auto", "--resume needs --out"),
        ("--resume digits", "put a recipe first: digits --resume"),
        ("--resume src", "use --resume --out src"),
    ],
)
def test_wrong_options(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong option is explained in a sentence, with status 2."""
    assert main(["train", *words.split()]) == Status.USAGE
    printed = capsys.readouterr().err
    assert said in printed
    assert "Traceback" not in printed


def test_options_of_other_libraries_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """For another library's option in any spelling, the message names our option; the table is in the documentation."""
    for ours, theirs in FOREIGN.items():
        for name in theirs.split():
            for written in (f"--{name}", f"--trainer.{name.replace('-', '_')}=3", f"--{name.upper()}"):
                assert f"`{ours}`" in explain_unknown([written, "3"])
    assert main(["train", "--batch_size", "3"]) == Status.USAGE
    assert "Multiply a batch size per device" in capsys.readouterr().err

    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    section = text.partition("\n## Coming from another library")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|", section, flags=re.MULTILINE))
    assert {ours: names.replace("`", "").replace(",", "") for ours, names in rows.items()} == FOREIGN


@pytest.mark.slow
def test_init_writes_a_recipe_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch init` writes a recipe, `anybatch train` runs it unchanged, and a second init does not overwrite it."""
    file = tmp_path / "my_first_recipe.py"
    assert main(["init", str(file)]) == Status.DONE
    content = file.read_text()
    assert main(["train", str(file), "--epochs", "1", "--out", str(tmp_path / "run")]) == Status.DONE
    printed = capsys.readouterr()
    assert "finished     10 steps, 1,000 samples" in printed.out
    assert "Traceback" not in printed.err

    file.write_text(content + "# mine")
    assert main(["init", str(file)]) == Status.USAGE
    assert file.read_text() == content + "# mine"
    assert sum(bool(line.strip()) for line in init.TEMPLATE.splitlines()) <= 25


def test_env_prints_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch env` prints versions and hardware, but no paths, user names or host names."""
    assert main(["env"]) == Status.DONE
    printed = capsys.readouterr().out
    for name in ("anybatch", "torch", "python", "cpu cores", "memory", "accelerators", "gloo", "nccl"):
        assert re.search(rf"^{name} +\S", printed, flags=re.MULTILINE), name
    assert socket.gethostname() not in printed
    assert str(Path.home()) not in printed
    assert not re.search(r"(^|\s)/\w", printed)


@pytest.mark.slow
def test_resume_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--resume --out` alone resumes with the run's recipe, ranks and settings, and reports changes."""
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", SPEC, "--steps", "3", "--micro-batch-size", "3", "--seed", "5", *out]) == Status.DONE
    assert f"anybatch train --resume --out {tmp_path / 'run'}" in capsys.readouterr().out
    assert main(["train", "--resume", *out, "--steps", "5", "--effective-batch-size", "16"]) == Status.DONE
    printed = capsys.readouterr()
    assert "effective_batch_size 8 -> 16" in printed.err
    assert "2 steps (5 in total), 26 samples" in printed.out
    first, second = logged(tmp_path / "run", "start")
    assert (first["seed"], second["seed"], second["micro_batch_size"]) == (5, 5, 3)

    assert main(["train", SPEC, *out]) == Status.USAGE
    assert "add --resume" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == Status.FILES
    assert "run.json is missing" in capsys.readouterr().err


def test_taken_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that cannot connect because the port is in use reports it with status 6."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1")):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert main(["train", SPEC, "--out", str(tmp_path / "run")]) == Status.RANKS
    printed = capsys.readouterr().err
    assert "the ranks could not connect" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("verb", "code"), [("train", "0"), ("tune", "'sample 3 is missing'")])
def test_user_code_that_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, code: str) -> None:
    """If a recipe calls sys.exit, every command ends with an error that shows the line."""
    name = f"exits_{verb}_{len(code)}"
    (tmp_path / f"{name}.py").write_text(EXITS.format(code=code))
    words = ["--out", str(tmp_path / "run")] if verb == "train" else []

    assert main([verb, str(tmp_path / f"{name}.py"), *words]) == Status.UNEXPECTED
    said = capsys.readouterr().err
    assert f"sys.exit({code})" in said
    assert "SystemExit" in said


def test_options_without_docstrings() -> None:
    """Without docstrings (python -OO), options have no help, and are all there."""
    program = "from anybatch.cli.train import make_parser; print(make_parser().format_usage())"
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True, check=True)  # noqa: S603 (a fixed program)
    assert all(f"--{word}" in done.stdout for word in OWN_OPTIONS)


@pytest.mark.slow
def test_the_suggested_commands_need_no_extra(tmp_path: Path) -> None:
    """Without numpy and scikit-learn, the command that the overview suggests works, and so does the next one."""
    bare = "import sys; sys.modules.update(numpy=None, sklearn=None); from anybatch.cli.main import main; "
    output = ""
    for start, more in (("", []), ("Start with: anybatch", []), ("Run it: anybatch", ["--steps", "2"])):
        words = output.partition(start)[2].split() if start else []
        done = subprocess.run(  # noqa: S603 (our own commands)
            [sys.executable, "-c", f"{bare}sys.exit(main(sys.argv[1:]))", *words, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        output = done.stdout

        assert "numpy" not in done.stderr.lower()

    assert (tmp_path / "train.py").exists()
    assert "finished     2 steps" in output
