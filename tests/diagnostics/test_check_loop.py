"""A loop is judged as it is: right ones without a word, wrong ones by name, with both values."""

import ctypes
import gc
import importlib
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anybatch.cli.main import main
from anybatch.cli.status import Status
from anybatch.diagnostics import check_loop
from anybatch.diagnostics.loop_check import findings as sentences
from anybatch.diagnostics.loop_check.report import LoopReport, LoopVerdict, fraction, ranges
Enclosure = in_own_process = None
from anybatch.diagnostics.loop_check.probe import RowModel, make_data
from anybatch.diagnostics.loop_check.recorder import Recorder
from anybatch.diagnostics.loop_check.parameters import method_of
group_of_one = None
from anybatch.errors import UserError
from tests.architecture.leak_police import Holdings, has_no_more_groups, holdings, settled
from tests.architecture.source_tree import ROOT
from tests.diagnostics import loops, published_loops
from tests.faults import sees

Loop = Callable[..., Any]
NOT_IN_GRADIENT = {
    *("schedules_every_micro_batch", "logs_last_loss", "does_not_end"),
    *("no_sync_around_backward_only", "reduces_every_micro_batch"),
}


def expected_verdict(codes: set[str]) -> LoopVerdict:
    """Return the verdict that goes with these findings."""
    if codes == {"constant_factor"}:
        return LoopVerdict.CONSTANT_FACTOR
    return LoopVerdict.EXACT if codes <= NOT_IN_GRADIENT else LoopVerdict.NOT_EQUAL


class Ignoring:
    """Whoever is told of forwards and passes and does not care."""

    def forward(self, ids: object, outputs: object) -> None:
        """Do nothing."""

    def begin_pass(self) -> int:
        """Return a number."""
        return 0

    def end_pass(self, number: int) -> None:
        """Do nothing."""


def num_hooks() -> tuple[int, int]:
    """Return how many hooks torch has for all optimizers and for all modules."""
    optimizers = importlib.import_module("torch.optim.optimizer")  # `torch.optim.optimizer` is hidden by a name
    return len(optimizers._global_optimizer_pre_hooks), len(nn.modules.module._global_forward_pre_hooks)  # noqa: SLF001


def with_settings(args, model, optimizer, train_loader):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 (as people write it)
    """Accumulate as often as an attribute says that nobody has listed."""
    for i, (x, y) in enumerate(train_loader):
        (F.cross_entropy(model(x), y) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


@sees(
    "a setting that accumulates is guessed",
    "src/anybatch/diagnostics/loop_check.parameters.py",
    '"accumulation_steps" if "accum" in name.lower() else ""',
    '""',
)
def test_a_setting_that_accumulates_is_known_by_its_word() -> None:
    """A settings object is asked for accumulation steps by any name with that word in it; the loop's fault is found."""
    found = check_loop(with_settings)

    assert found.codes == {"tail_carried"}
    assert found.accumulation_steps == 3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_are_read_from_the_gradient(reduction: str) -> None:
    """Row i of the model's gradient is sample i's weight times its loss's gradient, computed the plain way."""
    data = make_data("classes")
    model = RowModel(data, 2.0, Ignoring())
    F.cross_entropy(model(data.inputs[4:10]), data.targets[4:10], reduction=reduction).backward()
    outputs = data.outputs[4:10, 0]
    plain = outputs.softmax(1) - F.one_hot(data.targets[4:10], outputs.shape[1])
    assert model.table.grad is not None
    found = model.table.grad[:, 0] / 2.0

    torch.testing.assert_close(found[4:10], plain / (6 if reduction == "mean" else 1), rtol=1e-12, atol=0.0)
    assert not found[:4].any()
    assert not found[10:].any()


def test_outputs_do_not_follow_the_parameters() -> None:
    """Whatever an optimizer does to the table, outputs stay bit for bit, so that all steps can be compared."""
    data = make_data("tokens")
    model = RowModel(data, 2.0, Ignoring())
    nn.init.normal_(model.table)
    assert torch.equal(model(data.inputs), data.outputs)


@sees(
    "loops: what a loop that is ended has left is held against it",
    "src/anybatch/diagnostics/loop_check/judge.py",
    "trace.ended and not trace.has_more_passes for trace",
    "trace.ended for trace",
    cases=["right_for_ever"],
)
@sees(
    "loops: a model does not know the number of items",
    "src/anybatch/diagnostics/loop_check.probe.py",
    'kwargs.get("num_items_in_batch")',
    "None",
    cases=["right_by_number_of_items"],
)
@pytest.mark.parametrize("loop", loops.RIGHT)
def test_right_loops_are_exact(loop: Loop) -> None:
    """A right loop, however it is written, has no finding, and every weight in its table is as expected."""
    report = check_loop(loop)

    assert (report.verdict, report.codes) == (LoopVerdict.EXACT, frozenset()), str(report)
    for window in report.windows:
        assert window.found == pytest.approx(window.expected, rel=1e-6)


@sees(
    "loops: a window that is not over has no step",
    "src/anybatch/diagnostics/loop_check/check_loop.py",
    "if traces[0].has_more_passes and not traces[0].steps:",
    "if False:",
)
def test_a_window_longer_than_the_data_is_refused() -> None:
    """A loop that is ended in its first window is not said to make no steps; what can be judged is named."""
    with pytest.raises(UserError, match=r"by_forty made no step in 12 micro-batches.* parameter accumulation_steps"):
        check_loop(loops.right_for_ever_by_forty)


@sees(
    "loops: stale gradients go unseen",
    "src/anybatch/diagnostics/loop_check/windows.py",
    "        return not (self.is_stale or self.lost",
    "        return not (self.lost",
)
@pytest.mark.slow
@pytest.mark.parametrize(("loop", "codes"), loops.WRONG.items())
def test_wrong_loops_are_named(loop: Loop, codes: set[str]) -> None:
    """Each published fault is found by its name, and nothing else is."""
    report = check_loop(loop)

    assert report.codes == codes, str(report)
    assert report.verdict == expected_verdict(codes)
    assert all(finding.found != finding.expected and finding.change for finding in report.findings)


@pytest.mark.slow
@pytest.mark.parametrize("loop", loops.RIGHT_ON_RANKS)
def test_right_loops_on_ranks_are_exact(loop: Loop) -> None:
    """On two ranks with uneven shares a right loop has no finding, by DDP and by its own reduction."""
    report = check_loop(loop)

    assert (report.num_ranks, report.verdict, report.codes) == (2, LoopVerdict.EXACT, frozenset()), str(report)
    assert {sample for window in report.windows for sample in window.found} == set(range(31))


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "codes"), loops.WRONG_ON_RANKS.items())
def test_wrong_loops_on_ranks_are_named(loop: Loop, codes: set[str]) -> None:
    """What goes wrong between ranks is found by its name, and nothing else is."""
    report = check_loop(loop)

    assert report.codes == codes, str(report)
    assert report.verdict == expected_verdict(codes)


@sees(
    "loops: a wrapper is kept by what counts its reductions",
    "src/anybatch/diagnostics/loop_check/recorder.py",
    "return allreduce_hook(group, bucket)",
    "return allreduce_hook(module.process_group, bucket)",
)
@pytest.mark.slow
def test_a_wrapper_is_let_go() -> None:
    """What counts the reductions of the user's wrapper does not keep it, and so not its process group either."""
    recorder, data = Recorder(None, 1.0, 20.0), make_data("classes")
    with group_of_one():
        wrapper = nn.parallel.DistributedDataParallel(RowModel(data, 1.0, recorder))
        with recorder:
            recorder.watch(wrapper.module.table, [])
            wrapper(data.inputs).sum().backward()
    assert recorder.trace.reductions == 1

    reference = weakref.ref(wrapper)
    del wrapper, recorder
    gc.collect()
    assert reference() is None


def first_wrapper() -> tuple[Holdings, Holdings]:
    """Run in a process of its own: what it holds before and after a group in which it makes its first wrapper."""
    before = holdings()
    with group_of_one():
        nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
    return before, settled(before, has_no_more_groups)


@sees(
    "groups: torch's modules keep the group in which they are imported",
    "src/anybatch/parallel/torch_internals.py",
    "import torch.distributed.nn.functional\n",
    "",
)
@pytest.mark.slow
def test_the_first_wrapper_of_a_process_leaves_no_group() -> None:
    """What DDP imports when it is first made does not keep the group that there is at that moment."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        before, after = pool.submit(first_wrapper).result()
    assert after.num_group_threads == before.num_group_threads


@sees(
    "loops: the first kind of data that runs is the only one",
    "src/anybatch/diagnostics/loop_check/check_loop.py",
    "kinds = TARGET_KINDS if",
    "kinds = TARGET_KINDS[:1] if",
)
@pytest.mark.slow
def test_all_kinds_of_data_are_tried() -> None:
    """A loop that is right with one target per sample, and runs on tokens too, is judged on these; one may be named."""
    report = check_loop(loops.right_with_all_else)
    assert (report.verdict, set(report.codes)) == (LoopVerdict.NOT_EQUAL, {"mean_of_token_means"})
    assert "on classes exact; on tokens not equal" in report.remarks[-1]
    assert check_loop(loops.right_with_all_else, data="classes").verdict == LoopVerdict.EXACT


@pytest.mark.slow
def test_tokens_are_weighed() -> None:
    """A mean over the targets of a window is exact, by any count of them; a mean of token means is not."""
    assert check_loop(loops.right_on_tokens).codes == frozenset()
    assert check_loop(loops.right_by_number_of_shifted_items, data="tokens").codes == frozenset()
    report = check_loop(loops.token_means, data="tokens")
    assert (report.verdict, set(report.codes)) == (LoopVerdict.NOT_EQUAL, {"mean_of_token_means"})


def test_both_values_are_told() -> None:
    """A constant divisor's finding has the weights' sum, the fault's line, and the table has every weight."""
    report = check_loop(loops.divided_by_steps)
    found = {finding.code: finding for finding in report.findings}["constant_divisor"]
    lines = Path(loops.__file__).read_text(encoding="utf-8").splitlines()

    assert found.found == "weights of step 3 add up to 2/3"
    assert found.expected == "1"
    name, _, line = found.where.partition(":")
    assert (name, lines[int(line) - 1].strip()) == ("loops.py", "optimizer.step()")
    assert report.windows[2].found == pytest.approx(
        {**dict.fromkeys(range(24, 28), 1 / 12), 28: 1 / 9, 29: 1 / 9, 30: 1 / 9}
    )
    assert set(report.windows[2].expected.values()) == {1 / 7}
    assert [line.split() for line in report.table().splitlines()][3:5] == [
        ["3", "24-27", "1/12", "1/7"],
        ["28-30", "1/9", "1/7"],
    ]


def judged(name: str) -> LoopReport:
    """Return the report on a loop of `published_loops`, or on a method there."""
    owner, _, method = name.rpartition(".")
    found = getattr(published_loops, owner or name)
    return check_loop(method_of(found, method) if owner else found)


PUBLISHED = {loop.__name__: codes for loop, (_, codes) in published_loops.PUBLISHED.items()}
PUBLISHED |= {name: codes for name, (_, codes) in published_loops.METHODS.items()}
QUICK = ["build_nanogpt", "lbfgs_example", "pinn_by_grad", "sam_example", "clip_before_unscale", "weighted_classes"]
QUICK += ["imagenet_example", "MinGptTrainer.run", "pyg_gin", "tacotron2"]


def looks_right(codes: set[str], report: LoopReport) -> bool:
    """Whether a loop has the findings in its gradients that it has to have, or none at all."""
    found = {finding.code for finding in report.findings if finding.in_gradient}
    return codes <= found if codes else not found


@sees(
    "loops: a closure's gradient is looked for before it is computed",
    "src/anybatch/diagnostics/loop_check/recorder.py",
    "        if closure is None:",
    "        if closure is None or optimizer:",
    cases=["lbfgs_example"],
)
@sees(
    "loops: gradients that are added to nothing go unseen",
    "src/anybatch/diagnostics/loop_check/recorder.py",
    "        if self._incoming is not None:\n            self._append(None)",
    "        self._incoming = None",
    cases=["pinn_by_grad"],
)
@sees(
    "loops: a first pass of SAM is a lost one",
    "src/anybatch/diagnostics/loop_check/windows.py",
    "elif kept and all(part.ids in coming for part in kept):",
    "elif kept and not coming:",
    cases=["sam_example"],
)
@sees(
    "loops: scaled gradients are not compared",
    "src/anybatch/diagnostics/loop_check/judge.py",
    "if not is_close(scaled_step.gradient, plain_step.gradient):",
    "if not is_close(scaled_step.gradient, scaled_step.gradient):",
    cases=["clip_before_unscale"],
)
@pytest.mark.parametrize("name", QUICK)
def test_forms_of_published_loops(name: str) -> None:
    """Closures, `autograd.grad`, SAM, scalers, settings, methods, graphs, next_batch() are judged for what they do."""
    report = judged(name)
    assert looks_right(PUBLISHED[name], report), str(report)


@pytest.mark.published
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in QUICK])
def test_published_loops(name: str) -> None:
    """All others are, too: no false alarm, and nothing missed."""
    report = judged(name)
    assert looks_right(PUBLISHED[name], report), str(report)


@sees(
    "loops: what Python writes elsewhere goes through",
    "src/anybatch/diagnostics/loop_check/own_process.py",
    "            if writes and not isinstance(path, int):\n                self._make_own(path, with_end=True)",
    "            if writes and not isinstance(path, int):\n                pass",
)
def test_nothing_of_the_users_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop reads, overwrites, appends and removes files of its folder as ever, and none of the user's changes."""
    (tmp_path / "runs").mkdir()
    contents = {"best.pt": "weights", "log.csv": "1\n", "old.txt": "old", "runs/a.txt": "a", "settings.txt": "9"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)

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

    assert report.verdict == LoopVerdict.EXACT
    assert {"best.pt", "log.csv", "runs/a.txt"} <= set(report.written)
    assert {name: (tmp_path / name).read_text(encoding="utf-8") for name in contents} == contents
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {*contents, "runs"}


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda path: path.write_text("mine", encoding="utf-8"), "would have changed"),
        (lambda path: torch.save([1], path), "would have changed"),
        (lambda path: path.unlink(), "would have changed"),
        (lambda path: subprocess.run([sys.executable, str(path)], check=True), "would have started a program"),  # noqa: S603
        (lambda _: socket.create_connection(("192.0.2.1", 80), 1.0), "would have connected to 192.0.2.1"),
    ],
)
def test_what_leaves_the_folder_is_refused(tmp_path: Path, act: Callable[[Path], Any], said: str) -> None:
    """A file elsewhere, a program and the network are refused with what it was, and the file is as before."""
    file = tmp_path / "theirs"
    file.write_text("theirs", encoding="utf-8")

    def careless(model: Any, loader: Any) -> None:
        assert model
        assert loader
        act(file)

    with pytest.raises(UserError, match=said):
        check_loop(careless, data="classes")
    assert file.read_text(encoding="utf-8") == "theirs"


@pytest.mark.skipif(sys.platform != "linux", reason="the guard is that of Linux")
def test_linux_refuses_what_python_does_not_see(tmp_path: Path) -> None:
    """A file that C opens is refused by the kernel, where it has Landlock; and the network is another one."""
    file = tmp_path / "theirs"
    file.write_text("theirs", encoding="utf-8")

    def by_c(enclosure: Enclosure) -> tuple[bool, bool, int]:
        libc = ctypes.CDLL(None)
        opened = libc.open(str(file).encode(), os.O_WRONLY | os.O_TRUNC)
        return enclosure.kernel_guards_files, enclosure.kernel_guards_network, opened

    files, network, opened = in_own_process(by_c, most_seconds=60.0)
    if not files:
        pytest.skip("this kernel has no Landlock")
    assert opened == -1
    assert file.read_text(encoding="utf-8") == "theirs"
    assert network in {True, False}


def test_a_file_is_not_run_before_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A script without the function that was named is refused unread; one that writes when imported writes nowhere."""
    ran = tmp_path / "ran"
    script = tmp_path / "a_script_that_trains.py"
    body = f"open({str(ran)!r}, 'w').write('ran')\n\ndef train(model, loader, optimizer):\n    pass\n"
    script.write_text(body, encoding="utf-8")

    assert main(["check", "--loop", f"{script}:nothing"]) == Status.USAGE
    assert "was not run" in capsys.readouterr().err
    assert main(["check", "--loop", f"{script}:train"]) == Status.USAGE
    assert "would have changed" in capsys.readouterr().err
    assert not ran.exists()
    assert not (tmp_path / "__pycache__").exists()


@pytest.mark.slow
def test_a_loop_that_spins_is_ended() -> None:
    """A loop that calls nothing of ours is ended by the time limit, and that is said."""
    report = check_loop(loops.spinning, time_limit_seconds=0.2)
    assert report.codes == {"never_steps", "does_not_end"}
    assert report.verdict == LoopVerdict.NOT_EQUAL


def test_a_loop_that_raises_shows_its_own_error() -> None:
    """The message has the loop's traceback, from its own line on, and what it was called with."""

    def broken(model: Any, loader: Any) -> None:
        for inputs, _ in loader:
            model(inputs).no_such_thing()

    with pytest.raises(
        UserError, match=r"(?s)broken raised.*model: model, loader: loader.*no_such_thing\(\)"
    ) as caught:
        check_loop(broken)
    assert "loops/run.py" not in str(caught.value)


@pytest.mark.slow
def test_a_loop_that_raises_on_ranks_shows_its_own_error() -> None:
    """On ranks too: the loop's own traceback, and that the ranks have joined already."""
    with pytest.raises(UserError, match=r"(?s)raises_on_ranks raised.*have joined.*rank \d is broken") as caught:
        check_loop(loops.raises_on_ranks, data="classes")
    assert "loops/run.py" not in str(caught.value)


def test_parameters_are_understood_or_asked_for() -> None:
    """What cannot be filled is named, with the names that can; so is a loop without a model."""

    def unclear(model: Any, loader: Any, wizard: Any) -> None:
        """Never called."""

    def bare(optimizer: Any) -> None:
        """Never called."""

    with pytest.raises(UserError, match=r"(?s)'wizard'.*wrap the loop.*accumulation steps: accumulation_steps, "):
        check_loop(unclear)
    with pytest.raises(UserError, match="takes 'optimizer'; a loop to judge takes at least a model"):
        check_loop(bare)
    with pytest.raises(UserError, match="not 3"):
        check_loop(3)  # type: ignore[arg-type]


def test_nothing_is_changed() -> None:
    """Random states, settings, torch's global hooks and the terminal are as before, also after a loop that raised."""

    def careless(model: Any, loader: Any, optimizer: Any) -> None:
        torch.manual_seed(7)
        random.seed(7)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        print("loss")  # noqa: T201 (as users do)
        raise ValueError(model, loader, optimizer)

    python, default, hooks = random.getstate(), torch.get_rng_state(), num_hooks()
    check_loop(loops.divided_by_steps)
    with pytest.raises(UserError, match="careless raised"):
        check_loop(careless)

    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), default)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert num_hooks() == hooks


def test_an_unknown_scale_is_said() -> None:
    """A loop without accumulation steps and with an unusual loss is judged up to a factor, and that is said."""

    def unusual(model: Any, loader: Any, optimizer: Any) -> None:
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(model(x), y, label_smoothing=0.3) / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = check_loop(unusual)
    assert report.codes == {"mean_of_means"}
    assert report.accumulation_steps == 4
    assert "cannot be seen" in report.remarks[0]


@pytest.mark.slow
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`anybatch check --loop` prints the report; status 0 without findings, 8 with some, 2 for what is no loop."""
    file = tmp_path / "my_loops.py"
    shutil.copy(loops.__file__, file)

    assert main(["check", "--loop", f"{file}:right_by_window"]) == Status.DONE
    assert "right_by_window: exact (accumulation steps 3); no findings" in capsys.readouterr().out
    assert main(["check", "--loop", f"{file}:tail_dropped"]) == Status.NOT_EXACT
    assert "tail_dropped (my_loops.py:" in capsys.readouterr().out
    assert main(["check", "--loop", f"{file}:nothing"]) == Status.USAGE
    assert main(["check", "--loop", "nowhere.py:loop"]) == Status.USAGE
    assert "A loop is named as a file (file.py:function)" in capsys.readouterr().err
    assert main(["check", "digits", "--loop", f"{file}:right_by_window"]) == Status.USAGE
    assert "one at a time" in capsys.readouterr().err


def test_findings_are_documented() -> None:
    """docs/command_line.md has a line for every finding there is, and for no others."""
    text = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    begin = text.index("| finding |")
    section = text[begin : text.index("In Python it is", begin)]
    documented = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    source = Path(sentences.__file__).read_text(encoding="utf-8")
    codes = {line.split('"')[1] for line in source.splitlines() if line.strip().startswith('code="')}
    codes |= set(sentences._UNEVEN) | set(sentences._REDUCES)  # noqa: SLF001

    assert documented == codes


def test_numbers_are_shown_as_people_write_them() -> None:
    """Weights are fractions where they are, and samples are ranges."""
    assert [fraction(value) for value in (1 / 12, 5 / 3, 0.0, 0.12341234)] == ["1/12", "5/3", "0", "0.1234"]
    assert Fraction(fraction(2 / 21)) == Fraction(2, 21)
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
