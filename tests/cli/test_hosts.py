"""Several hosts under torchrun, and a run that continues when one of them fails."""

import os
import select
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from anybatch.cli.status import Status
from tests.architecture.source_tree import PACKAGE, ROOT
from tests.cli.small import FAULT, SAID, SPEC, STEPS_PER_EPOCH, logged, run, samples_of_steps
from tests.hosts import Host, NoHostsError, hosts

TIMEOUT_SECONDS = 600
IN_EPOCH_3 = 29  # a call of the loss on the third rank, one sample per call


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[list[Host]]:
    """Three hosts with separate networks; skipped if the system does not allow that."""
    with ExitStack() as ends:
        try:
            made = ends.enter_context(hosts(3))
        except NoHostsError as error:
            pytest.skip(str(error))
        yield made


@pytest.mark.slow
def test_a_lost_host(tmp_path: Path, three_hosts: list[Host]) -> None:
    """If one of three hosts is killed in the middle of a step, the others resume, with each sample used once."""
    said = tmp_path / "said"
    os.mkfifo(said)
    with ExitStack() as ends:
        pipe = os.open(said, os.O_RDWR)
        ends.callback(os.close, pipe)
        agents = [
            host.start(torchrun(tmp_path / "run"), env=environment(said), out=ends.enter_context(output.open("w")))
            for host, output in zip(three_hosts, outputs(tmp_path), strict=True)
        ]
        for agent in agents:
            ends.enter_context(agent)
            ends.callback(agent.kill)
        wait_for_word(pipe)
        three_hosts[2].kill()
        ended = [agent.wait(TIMEOUT_SECONDS) for agent in agents[:2]]

    assert ended == [Status.DONE, Status.DONE], "\n".join(output.read_text() for output in outputs(tmp_path))
    starts = [(line["first_step"], line["world_size"]) for line in logged(tmp_path / "run", "start")]
    assert starts == [(0, 3), (2 * STEPS_PER_EPOCH, 2)]
    run(tmp_path / "one host")
    assert samples_of_steps(tmp_path / "run") == samples_of_steps(tmp_path / "one host")


def outputs(folder: Path) -> list[Path]:
    """Return the output files of the hosts."""
    return [folder / f"host{number}" for number in range(3)]


def wait_for_word(pipe: int) -> None:
    """Wait until something is written to a pipe."""
    assert select.select([pipe], [], [], TIMEOUT_SECONDS)[0], "the rank that hangs has not reported it"


def torchrun(folder: Path) -> list[str]:
    """Return the command that is started on every host."""
    elastic = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "2", "--rdzv-id", "job"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-conf", "last_call_timeout=2"]
    job = ["-m", "anybatch", "train", SPEC, "--micro-batch-size", "1", "--out", str(folder)]
    return [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting, *job]


def environment(said: Path) -> dict[str, str]:
    """Return the environment of every host: the last of three ranks hangs in the last epoch."""
    fault = {FAULT: f"hang:{IN_EPOCH_3}:2", SAID: str(said)}
    path = f"{PACKAGE.parent}{os.pathsep}{ROOT}"
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **fault}
