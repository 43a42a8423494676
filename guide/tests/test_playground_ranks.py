"""A playground run on two ranks equals the run on one: results, streaming, and control from the parent process."""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from anybatch_guide.playground import PlaygroundSetting, as_python, run
from anybatch_guide.rank_processes import RankError
from guide.tests.test_playground import Line, Stopped, of_kind, stop_after_twenty

pytestmark = pytest.mark.slow

SPIRALS: dict[str, Any] = {"task": "spirals", "micro_batch_size": 4, "optimizer": "sgd", "learning_rate": 0.5}
TWO = PlaygroundSetting(**SPIRALS, accumulation_steps=2, steps=4, ranks=2)
"""The same 16 samples per step as ONE."""
ONE = PlaygroundSetting(**SPIRALS, accumulation_steps=4, steps=4)


def played(setting: PlaygroundSetting, **options: Any) -> tuple[Mapping[str, Any], list[Line]]:
    """Return the result of a run, and its lines."""
    lines: list[Line] = []
    return run(setting, lines.append, **options), lines


def test_two_ranks_equal_one() -> None:
    """Losses and parameters equal one rank and the native batch, and gradients are sent once per step."""
    (two, lines), (one, _) = played(TWO), played(ONE)
    gradient_bytes = of_kind(lines, "start")[0]["gradient_bytes"]
    places = {(line["rank"], line["position"]) for line in of_kind(lines, "micro_batch")}

    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["first_update_difference"] < 1e-5
    assert max(two["relative_differences"]) < 1e-5
    assert two["reduced_bytes"] == gradient_bytes
    assert one["reduced_bytes"] == 0
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [line["rank"] for line in of_kind(lines, "step")] == [0] * 4
    assert two["peak"]["weights"] == one["peak"]["weights"]
    assert (two["status"], lines[-1]["digest"]) == ("completed", two["digest"])


def test_a_stepped_run_shows_the_sum_of_each_rank() -> None:
    """On two ranks, the sums at the end of the first step add up to the sum of one rank with all samples."""
    seen = {
        setting.ranks: of_kind(played(setting, is_stepped=lambda: True)[1], "guide.micro_batch")
        for setting in (ONE, TWO)
    }
    whole = next(line for line in seen[1] if (line["step"], line["position"]) == (0, 3))
    shares = [line for line in seen[2] if (line["step"], line["position"]) == (0, 1)]
    together = [sum(numbers) for numbers in zip(*(line["sum"] for line in shares), strict=True)]

    assert [line["rank"] for line in shares] in ([0, 1], [1, 0])
    torch.testing.assert_close(torch.tensor(together), torch.tensor(whole["sum"]), rtol=2e-3, atol=1e-5)


@pytest.fixture
def started() -> Callable[[], list[BaseProcess]]:
    """Return a function () -> the processes started by this test; ranks of other tests may also be running."""
    former = {process.pid for process in multiprocessing.active_children()}
    return lambda: [process for process in multiprocessing.active_children() if process.pid not in former]


LISTENS, LOOPBACK = "0A", "0100007F"
"""The state of a socket and the address 127.0.0.1, as Linux writes them."""


def listened_at(process: int) -> set[str]:
    """Return the addresses at which a process listens for connections, as Linux writes them."""
    folder = Path("/proc", str(process))
    own = {str(file.readlink()) for file in (folder / "fd").iterdir() if file.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in (folder / "net" / name).read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_only_on_loopback(started: Callable[[], list[BaseProcess]]) -> None:
    """During a run, its ranks accept connections only from this machine."""
    found: list[set[str]] = []

    def emit(line: Line) -> None:
        if line["kind"] == "step" and not found:
            found.extend(listened_at(process.pid or 0) for process in started())

    run(TWO, emit)
    assert found == [{LOOPBACK}] * 2


def test_a_run_that_is_cancelled_leaves_no_rank(started: Callable[[], list[BaseProcess]]) -> None:
    """An exception of `emit` within a step propagates, and both ranks end."""
    with pytest.raises(Stopped):
        run(TWO, stop_after_twenty())
    assert started() == []


@pytest.mark.parametrize("num_killed", [1, 2])
def test_a_dead_rank_is_reported(started: Callable[[], list[BaseProcess]], num_killed: int) -> None:
    """If ranks are killed during a run, the run ends with an error, and the other rank ends too."""
    lines: list[Line] = []

    def emit(line: Line) -> None:
        lines.append(line)
        if len(lines) == 20:
            for process in started()[:num_killed]:  # the answer to the last message fails too
                process.kill()
                process.join()

    with pytest.raises(RankError):
        run(TWO, emit)
    assert started() == []


def test_both_ranks_retry_with_smaller_micro_batches() -> None:
    """With too little memory, both retry with the same smaller micro-batches; with far too little, the run fails."""
    setting: dict[str, Any] = {"micro_batch_size": 64, "accumulation_steps": 2, "steps": 2, "ranks": 2}
    smaller, lines = played(PlaygroundSetting(**setting, memory_limit_kib=2048))
    failed, _ = played(PlaygroundSetting(**setting, memory_limit_kib=300))

    assert smaller["smaller_sizes"]
    assert smaller["first_update_difference"] < 1e-5
    assert max(smaller["relative_differences"]) < 1e-5
    assert len(of_kind(lines, "out_of_memory")) == len(smaller["smaller_sizes"])
    assert (failed["status"], failed["losses"]) == ("failed", [])
    assert "memory" in failed["message"]
    assert failed["first_update_difference"] is None


@pytest.mark.published
def test_a_program_on_two_ranks_prints_the_same(tmp_path: Path) -> None:
    """The program of the page prints the losses of the run under torchrun."""
    file = tmp_path / "program.py"
    file.write_text(as_python(TWO), encoding="utf-8")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 (our own program)

    assert done.returncode == 0, done.stderr
    assert list(map(float, done.stdout.split())) == played(TWO)[0]["losses"]
