"""Real processes are killed: the files on disk are enough to resume, and each message is printed once."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor
from torch.testing import assert_close

from anybatch.cli.status import Status
from anybatch.core.run_config import RunConfig
from anybatch.parallel.world import World
from anybatch.recipes import session
from tests.architecture.source_tree import PACKAGE, ROOT
from tests.cli.small import (
    CROWDED,
    FAULT,
    SAID,
    SPEC,
    STEPS_PER_EPOCH,
    crowded_job,
    lines,
    logged,
    parameters,
    run,
    samples_of_steps,
)
from tests.cli.test_session import resume, same_bits
from tests.ranks_fixture import Ranks

TIMEOUT_SECONDS = 600
IN_STEP_10 = {1: 79, 2: 39}  # number of ranks: a call of the loss on each rank, one sample per call


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished command line: its exit status and its output."""

    status: int
    result: str
    said: str


def train(
    folder: Path,
    *extra: str,
    spec: str = SPEC,
    fault: str = "",
    ranks: int = 1,
    torchrun: tuple[str, ...] | None = None,
) -> Ended:
    """Train a small job on the CPU, one sample at a time, and wait for all processes that write."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    said = folder.with_name("said")
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *(torchrun or ())]
    ranks_here = [] if torchrun is not None else ["--ranks", str(ranks)]
    options = ["--micro-batch-size", "1", "--out", str(folder), *ranks_here, *extra]
    with said.open("w") as errors:
        done = subprocess.run(  # noqa: S603 (a fixed program)
            [sys.executable, *(starter if torchrun is not None else ()), "-m", "anybatch", "train", spec, *options],
            cwd=ROOT,
            env={**env, FAULT: fault, SAID: str(said)},
            stdout=subprocess.PIPE,  # open until the last rank ends, which may be after its launcher
            stderr=errors,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    return Ended(done.returncode, done.stdout, said.read_text())


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> dict[int, Path]:
    """Folders of uninterrupted runs on one rank and on two."""
    folder = tmp_path_factory.mktemp("through")
    run(folder / "1")
    two_ranks.run(run, folder / "2")
    return {1: folder / "1", 2: folder / "2"}


def test_killed_rank_of_two(tmp_path: Path, through: dict[int, Path], two_ranks: Ranks) -> None:
    """If one of two ranks is killed, the other ends too, and one message names the rank and how to resume."""
    ended = train(tmp_path / "run", ranks=2, fault=f"kill:{IN_STEP_10[2]}:1")
    assert ended.status == Status.RANKS
    assert ended.said.count("rank 1 was killed") == 1
    assert "Traceback" not in ended.said
    assert f"anybatch train --resume --out {tmp_path / 'run'}" in ended.said

    two_ranks.run(resume, tmp_path / "run")
    assert same_bits(parameters(tmp_path / "run"), parameters(through[2]))


@pytest.mark.slow
def test_error_of_all_ranks(tmp_path: Path) -> None:
    """An error that all ranks raise, such as a NaN loss, is printed once, and its status is returned."""
    ended = train(tmp_path / "run", "--learning-rate", "1e300", ranks=2)

    assert ended.status == Status.NOT_FINITE, ended.said
    assert ended.said.count("is not finite") == 1


def test_stopped_launcher(tmp_path: Path, through: dict[int, Path], two_ranks: Ranks) -> None:
    """SIGTERM to the launcher ends two ranks after the step, and a resume gives bitwise the same result."""
    ended = train(tmp_path / "run", ranks=2, fault=f"terminate_launcher:{IN_STEP_10[2]}:0")
    assert ended.status == Status.STOPPED, ended.said
    (printed,) = [line for line in ended.result.splitlines() if line.startswith("resume")]
    assert printed.split(maxsplit=1)[1] == f"anybatch train --resume --out {tmp_path / 'run'}"
    assert logged(tmp_path / "run", "end")[-1]["num_steps"] == 11

    two_ranks.run(resume, tmp_path / "run")
    assert samples_of_steps(tmp_path / "run") == samples_of_steps(through[1])
    assert same_bits(parameters(tmp_path / "run"), parameters(through[2]))


@pytest.mark.slow
def test_second_interrupt_of_a_launcher(tmp_path: Path) -> None:
    """A second Ctrl-C immediately ends ranks that hang in a step."""
    ended = train(tmp_path / "run", ranks=2, fault=f"interrupt_twice:{IN_STEP_10[2]}:0")

    assert ended.status == Status.INTERRUPTED, ended.said
    assert "finishing this step" in ended.said
    assert "Traceback" not in ended.said
    assert "To resume from the newest checkpoint" in ended.said
    assert logged(tmp_path / "run", "end") == []


@pytest.mark.slow
def test_resumes_under_torchrun(tmp_path: Path, through: dict[int, Path]) -> None:
    """If a rank is killed, torchrun restarts all ranks with the same command, and they resume bitwise the same run."""
    # In the last epoch, at a call that a restarted rank does not reach.
    fault = f"kill:{57}:1"
    ended = train(tmp_path / "run", ranks=2, torchrun=("--max-restarts", "1"), fault=fault)

    assert ended.status == Status.DONE, ended.said
    assert [line["first_step"] for line in logged(tmp_path / "run", "start")] == [0, 2 * STEPS_PER_EPOCH]
    assert samples_of_steps(tmp_path / "run") == samples_of_steps(through[1])
    assert same_bits(parameters(tmp_path / "run"), parameters(through[2]))


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> dict[str, Tensor]:
    """Return the parameters of the crowded job with enough memory."""
    folder = tmp_path_factory.mktemp("roomy")
    two_ranks.run(run_roomy, folder / "run")
    return parameters(folder / "run")


@pytest.mark.slow
def test_resumes_in_smaller_micro_batches(tmp_path: Path, roomy: dict[str, Tensor]) -> None:
    """If DDP runs out of memory where it cannot recover, the run resumes with half the micro-batch size."""
    ended = train(tmp_path / "run", "--strategy", "ddp", "--micro-batch-size", "4", spec=CROWDED, ranks=2)

    assert ended.status == Status.DONE, ended.said
    assert ended.said.count("resuming with micro-batches of at most 2") == 1
    starts = [(line["first_step"], line["micro_batch_size"]) for line in logged(tmp_path / "run", "start")]
    assert starts == [(0, 4), (STEPS_PER_EPOCH, 2)]
    assert "goes_on_smaller" in [line["code"] for line in logged(tmp_path / "run", "diagnosis")]
    assert_close(parameters(tmp_path / "run"), roomy, rtol=1e-12, atol=1e-12)


def run_roomy(folder: Path) -> None:
    """Train the crowded job with enough memory for its largest micro-batches."""
    world = World.from_environment(device="cpu")
    session.train(crowded_job(most=4), folder, RunConfig(micro_batch_size=4), world=world)


@pytest.mark.slow
def test_killed_rank_alone(tmp_path: Path, through: dict[int, Path]) -> None:
    """A process killed in the middle of a step can be resumed from the last epoch, with bitwise the same result."""
    ended = train(tmp_path / "run", fault=f"kill:{IN_STEP_10[1]}:0")
    assert ended.status == -signal.SIGKILL, ended.said
    assert lines(tmp_path / "run")[-1]["kind"] != "end"

    resume(tmp_path / "run")
    assert [line["first_step"] for line in logged(tmp_path / "run", "start")] == [0, STEPS_PER_EPOCH]
    assert same_bits(parameters(tmp_path / "run"), parameters(through[1]))
