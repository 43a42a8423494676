"""Launchers: the variables of torchrun, srun and mpirun give this process's rank and the rendezvous address."""

import os
import socket
from collections.abc import Mapping

import pytest

from anybatch.errors import WorldError
from anybatch.parallel.launchers import Launch, find_launch, launch_id, listen_at_loopback

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_NODELIST": "gpu[003-004,009],big1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2(x3)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return the monkeypatch, with the variables of all launchers unset."""
    for name in (*NAMES, *SRUN, *MPIRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def given(variables: pytest.MonkeyPatch, values: Mapping[str, str]) -> None:
    """Set variables."""
    for name, value in values.items():
        variables.setenv(name, value)


def test_torchrun(variables: pytest.MonkeyPatch) -> None:
    """RANK and WORLD_SIZE override the variables of srun, which in this case has started torchrun."""
    given(variables, {**SRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert find_launch() == Launch(rank=3, size=4, local_rank=1, local_size=2)


def test_srun(variables: pytest.MonkeyPatch) -> None:
    """Tasks of srun meet on the first node of any list, at a port derived from job and step; others run alone."""
    given(variables, SRUN)
    port = 20_000 + 31 * 71 + 2
    assert find_launch() == Launch(rank=5, size=10, local_rank=1, local_size=2, init_method=f"tcp://gpu003:{port}")
    given(variables, {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "SLURM_GPUS_PER_TASK": "1"})
    assert find_launch() == Launch(rank=5, size=10, local_rank=1, local_size=1, init_method="tcp://elsewhere:1")
    variables.delenv("MASTER_ADDR")
    for nodes, first in (("big1,gpu[003-004]", "big1"), ("r[01-02]n", "r01n")):
        variables.setenv("SLURM_STEP_NODELIST", nodes)
        launch = find_launch()
        assert launch is not None
        assert launch.init_method == f"tcp://{first}:1"
    # In a batch script without srun, the variables describe a job but no step.
    for missing in ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"):
        given(variables, SRUN)
        variables.delenv(missing)
        assert find_launch() is None


def test_mpirun(variables: pytest.MonkeyPatch) -> None:
    """Processes of mpirun without an address are refused, instead of training separately."""
    given(variables, MPIRUN)
    with pytest.raises(WorldError):
        find_launch()
    # If the user's code has already connected them, only the device is needed.
    assert find_launch(joined=True) is not None
    given(variables, {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"})
    assert find_launch() == Launch(rank=1, size=2, local_rank=1, init_method="tcp://host0:29500")


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "mine", **SRUN}, "mine"),
        ({"TORCHELASTIC_RUN_ID": "none", **SRUN}, "71.2"),
        ({"TORCHELASTIC_RUN_ID": "none"}, None),
        ({"SLURM_JOB_ID": "71"}, None),
    ],
)
def test_name_of_a_launch(values: dict[str, str], name: str | None, variables: pytest.MonkeyPatch) -> None:
    """A job has the name given by its launcher; torchrun's "none" means no name."""
    given(variables, values)
    assert launch_id() == name


def test_gloo_uses_loopback(variables: pytest.MonkeyPatch) -> None:
    """Gloo uses the loopback interface."""
    variables.setenv("GLOO_SOCKET_IFNAME", "before")
    variables.setenv("NCCL_SOCKET_IFNAME", "before")
    listen_at_loopback()
    name = os.environ["GLOO_SOCKET_IFNAME"]

    assert name in {name for _, name in socket.if_nameindex()}
    assert name in {"lo", "lo0"}
