"""Loops are judged without changes: correct ones have no findings, others have the code of their fault."""

import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.diagnostics import check_loop
from anybatch.diagnostics.loop_check import sandbox
from anybatch.diagnostics.loop_check.report import FINDINGS, HARMLESS, LoopReport, LoopVerdict
from anybatch.errors import LoopError
from tests.architecture.source_tree import ROOT
from tests.diagnostics import loops, more_loops, published_loops
from tests.raising import raises

Loop = Callable[..., Any]
COLLECTION = published_loops.PUBLISHED | more_loops.MORE
PUBLISHED: dict[str, tuple[Any, set[str]]] = {loop.__name__: (loop, codes) for loop, (_, codes) in COLLECTION.items()}
QUICK = ["build_nanogpt", "lbfgs_example", "pinn_by_grad", "sam_example", "clip_before_unscale", "weighted_classes"]
QUICK += ["imagenet_example", "min_gpt", "pyg_gin", "tacotron2"]
SLOW_LOOPS = [
    "llama2_c",
    "word_language_model",
    "dcgan",
    "mean_teacher",
    "a2c",
    "graph_of_the_last",
    "torchtune_recipe",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, which is quick to copy."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_named(report: LoopReport, codes: set[str]) -> None:
    """Assert that a report has exactly these findings and the matching verdict."""
    verdict = LoopVerdict.EXACT if codes <= HARMLESS else LoopVerdict.NOT_EQUAL
    expected = LoopVerdict.CONSTANT_FACTOR if codes == {"constant_factor"} else verdict
    assert (set(report.codes), report.verdict) == (codes, expected), str(report)


CASES: dict[Loop, set[str]] = loops.CASES
SLOW = {*CASES} - {*loops.RIGHT}


@pytest.mark.parametrize(
    "loop", [pytest.param(loop, marks=pytest.mark.slow if loop in SLOW else (), id=loop.__name__) for loop in CASES]
)
def test_loops_have_their_findings(loop: Loop) -> None:
    """A correct loop, in any style and on uneven ranks, has no finding; a fault has its code, and no other is found."""
    report = check_loop(loop)

    assert_named(report, CASES[loop])
    on_ranks = loop in (*loops.RIGHT_ON_RANKS, *loops.WRONG_ON_RANKS)
    assert report.num_ranks == 1 + on_ranks
    if not CASES[loop]:
        if on_ranks:
            assert {sample for window in report.windows for sample in window.found} == set(range(31))
        for window in report.windows:
            assert window.found == pytest.approx(window.expected, rel=1e-6)


def mark_of(name: str) -> Any:
    """Return the mark of a published loop."""
    return () if name in QUICK else pytest.mark.slow if name in SLOW_LOOPS else pytest.mark.published


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark_of(name)) for name in PUBLISHED])
def test_published_loops(name: str) -> None:
    """Closures, `autograd.grad`, SAM, scalers, settings, streams, several models: no false alarm and no miss."""
    loop, codes = PUBLISHED[name]
    report = check_loop(loop)

    assert codes <= report.codes, str(report)
    assert codes or not any(finding.in_gradient for finding in report.findings), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "data", "codes"),
    [
        # Correct with one target per sample, and judged on both kinds that it runs on, or as asked.
        (loops.right_with_all_else, None, {"mean_of_token_means"}),
        (loops.right_with_all_else, "classes", set()),
        (loops.right_on_tokens, None, set()),
        (loops.right_by_number_of_shifted_items, "tokens", set()),
        (loops.token_means, "tokens", {"mean_of_token_means"}),
    ],
)
def test_token_weights(loop: Loop, data: Any, codes: set[str]) -> None:
    """A mean over the targets of a window is exact, by any count of them; a mean of token means is not."""
    assert_named(check_loop(loop, data=data), codes)


def test_a_finding_has_both_values_and_its_line() -> None:
    """A finding has the wrong sum of weights and the line of the step; the table has all weights."""
    report = check_loop(loops.divided_by_steps)
    finding = {finding.code: finding for finding in report.findings}["constant_divisor"]
    lines = Path(loops.__file__).read_text(encoding="utf-8").splitlines()

    assert (finding.found, finding.expected, finding.file) == ("weights of step 3 add up to 2/3", "1", "loops.py")
    assert [lines[line - 1].strip() for line in finding.lines] == ["optimizer.step()"]
    found = {**dict.fromkeys(range(24, 28), 1 / 12), 28: 1 / 9, 29: 1 / 9, 30: 1 / 9}
    assert report.windows[2].found == pytest.approx(found)
    assert set(report.windows[2].expected.values()) == {1 / 7}
    rows = [line.split() for line in report.table().splitlines()]
    assert rows[3:5] == [["3", "24-27", "1/12", "1/7"], ["28-30", "1/9", "1/7"]]


def test_an_unknown_scale_has_a_remark() -> None:
    """A loop without accumulation steps and with an uncommon loss is judged up to a factor, with a remark."""

    def uncommon(model: Any, loader: Any, optimizer: Any) -> None:
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y, label_smoothing=0.3) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = check_loop(uncommon)

    assert_named(report, {"mean_of_means"})
    assert (report.accumulation_steps, len(report.remarks)) == (4, 1)


@pytest.mark.slow
def test_the_subprocess_need_not_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an accelerator, the loop is imported by a new process, which judges it in the same way."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert_named(check_loop(loops.divided_twice), {"constant_factor"})


def test_a_window_longer_than_the_data_is_refused() -> None:
    """A loop that is stopped in its first window is not called a loop without steps."""
    with pytest.raises(LoopError) as caught:
        check_loop(loops.right_for_ever_by_forty)
    assert caught.value.cause is None


def test_a_loop_that_hangs_is_refused() -> None:
    """A loop that neither ends nor runs the model raises an error after the time limit."""
    with pytest.raises(LoopError) as caught:
        check_loop(loops.spinning, time_limit_seconds=1.0)
    assert "1 seconds" in str(caught.value)


def test_user_files_are_unchanged(folder: Path) -> None:
    """A loop reads, overwrites, appends and removes files of its folder, and the originals stay unchanged."""
    (folder / "runs").mkdir()
    contents = {"best.pt": "weights", "log.csv": "1\n", "old.txt": "old", "runs/a.txt": "a", "settings.txt": "9"}
    for name, text in contents.items():
        Path(name).write_text(text, encoding="utf-8")

    def careless(model: Any, loader: Any, optimizer: Any) -> None:
        assert Path("settings.txt").read_text(encoding="utf-8") == "9"
        with Path("log.csv").open("a", encoding="utf-8") as file:
            file.write("2\n")
        assert Path("log.csv").read_text(encoding="utf-8").startswith("1\n2\n")
        torch.save(model.state_dict(), "best.pt")
        Path("runs/a.txt").write_text("b", encoding="utf-8")
        Path("runs/new").mkdir(exist_ok=True)
        Path("old.txt").unlink(missing_ok=True)
        train: Loop = loops.right_by_window
        train(model, loader, optimizer, 1, 1)

    report = check_loop(careless, data="classes")

    assert_named(report, set())
    assert {name: Path(name).read_text(encoding="utf-8") for name in contents} == contents
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*")} == {*contents, "runs"}


@pytest.mark.parametrize(
    "act",
    [
        lambda path: path.write_text("mine", encoding="utf-8"),
        lambda path: torch.save([1], path),
        lambda path: path.unlink(),
        lambda path: path.with_name("link").symlink_to(path),
        lambda path: subprocess.run([sys.executable, str(path)], check=True),  # noqa: S603
        lambda _: socket.create_connection(("192.0.2.1", 80), 1.0),
    ],
    ids=["write", "save", "remove", "link", "program", "connection"],
)
def test_actions_outside_of_the_folder_are_refused(
    tmp_path_factory: pytest.TempPathFactory, act: Callable[[Path], Any]
) -> None:
    """Writes by absolute path, programs and connections are refused, and the file stays unchanged."""
    file = tmp_path_factory.mktemp("elsewhere") / "theirs"
    file.write_text("theirs", encoding="utf-8")

    def careless(model: Any, loader: Any) -> None:
        assert model
        assert loader
        act(file)

    with pytest.raises(LoopError) as caught:
        check_loop(careless, data="classes")
    assert caught.value.cause == "PermissionError"
    assert [path.name for path in file.parent.iterdir()] == ["theirs"]
    assert file.read_text(encoding="utf-8") == "theirs"


def test_large_files_are_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large files, links to folders and files over the limits are listed and not copied; hidden files are skipped."""
    monkeypatch.setattr(sandbox, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(sandbox, "MAX_BYTES", 12)
    (folder / "data").mkdir()
    (folder / "linked").symlink_to(folder / "data")
    for name, size in {"a.py": 4, "b.bin": 11, "data/c.py": 4, "data/d.py": 5, ".hidden": 1}.items():
        (folder / name).write_bytes(b"x" * size)

    target = folder.parent / f"{folder.name}-copy"
    left_out = sandbox.copy_folder(folder, target)

    assert set(left_out) == {"b.bin", "linked", "data/d.py"}
    assert {path.relative_to(target).as_posix() for path in target.rglob("*")} == {"a.py", "data", "data/c.py"}


def test_a_missing_large_file_is_explained(folder: Path) -> None:
    """If a loop needs a file that was not copied, the error has its name; an absolute path can be read."""
    large = folder / "large.bin"
    large.write_bytes(b"x" * (sandbox.MAX_FILE_BYTES + 1))

    def reads(model: Any, loader: Any) -> None:
        assert model
        assert loader
        assert large.stat().st_size
        Path("large.bin").read_bytes()

    with raises(LoopError, "large_files_left_out") as caught:
        check_loop(reads, data="classes")
    assert caught.value.cause == "FileNotFoundError"


def test_a_file_is_not_run_before_it_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A script without the given function is refused unread; a script that writes at import writes nowhere else."""
    ran = tmp_path_factory.mktemp("elsewhere") / "ran"
    script = folder / "a_script_that_trains.py"
    body = f"open({str(ran)!r}, 'w').write('ran')\n\ndef train(model, loader, optimizer):\n    pass\n"
    script.write_text(body, encoding="utf-8")

    assert main(["check", "--loop", f"{script}:nothing"]) == Status.USAGE
    assert main(["check", "--loop", f"{script}:train"]) == Status.USAGE
    assert not ran.exists()
    assert not (folder / "__pycache__").exists()


def raises_alone(model: Any, loader: Any) -> None:
    """Raise in the first micro-batch."""
    for inputs, _ in loader:
        model(inputs).no_such_thing()


@pytest.mark.parametrize(
    ("loop", "cause", "words"),
    [
        (raises_alone, "AttributeError", "no_such_thing()"),
        pytest.param(loops.raises_on_ranks, "ValueError", "is broken", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_raises_shows_its_own_error(loop: Loop, cause: str, words: str) -> None:
    """The message has the loop's traceback, from its own line on; on ranks too."""
    with pytest.raises(LoopError) as caught:
        check_loop(loop, data="classes")
    assert caught.value.cause == cause
    assert words in str(caught.value)
    assert "judged_loop.py" not in str(caught.value)


def test_unknown_parameters_are_refused() -> None:
    """Parameters without a known role are listed; so are the parameters of a loop without a model."""

    def unclear(model: Any, loader: Any, wizard: Any) -> None:
        """Never called."""

    def bare(optimizer: Any) -> None:
        """Never called."""

    for loop, parameters in ((unclear, ("wizard",)), (bare, ("optimizer",)), (3, ())):
        with pytest.raises(LoopError) as caught:
            check_loop(loop)  # type: ignore[arg-type]
        assert caught.value.parameters == parameters


def test_the_caller_is_unchanged() -> None:
    """Random states, settings and the terminal stay unchanged, also after a loop that raised."""

    def careless(model: Any, loader: Any, optimizer: Any) -> None:
        torch.manual_seed(7)
        random.seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        print("loss")  # noqa: T201 (as users do)
        raise ValueError(model, loader, optimizer)

    python, default = random.getstate(), torch.get_rng_state()
    with pytest.raises(LoopError):
        check_loop(careless)

    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), default)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.slow
def test_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch check --loop` prints the report; status 0 without findings, 8 with some, 2 for an unknown loop."""
    file = folder / "my_loops.py"
    shutil.copy(loops.__file__, file)

    assert main(["check", "--loop", f"{file}:right_by_window"]) == Status.DONE
    assert main(["check", "--loop", f"{file}:tail_dropped"]) == Status.NOT_EXACT
    assert "tail_dropped (my_loops.py:" in capsys.readouterr().out
    assert main(["check", "--loop", f"{file}:nothing"]) == Status.USAGE
    assert main(["check", "--loop", "nowhere.py:loop"]) == Status.USAGE
    assert main(["check", "digits", "--loop", f"{file}:right_by_window"]) == Status.USAGE


def test_findings_are_documented() -> None:
    """docs/command_line.md has a line for every finding, and for no others."""
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    begin = text.index("| finding |")
    section = text[begin : text.index("In Python:", begin)]
    assert {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")} == set(FINDINGS)
    assert set(FINDINGS) > HARMLESS


def with_engine(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
    """Train with an engine."""
    loss = ab.mean_over_samples(lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1]))
    engine = ab.Engine(model, optimizer, loss, micro_batch_size=4)
    for batch in loader:
        engine.step(batch)


def test_a_loop_with_an_engine_is_refused() -> None:
    """The engine checks its loss itself, and its additional forwards would look like steps of the loop."""
    with raises(LoopError, "uses_engine"):
        check_loop(with_engine)
