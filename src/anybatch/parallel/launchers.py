"""Launchers: the rank of this process under torchrun, a Kubernetes operator, srun or mpirun.

The only file that reads the launcher's environment.
"""

import atexit
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.util import get_temp_dir

from anybatch.errors import WorldError

_INIT_METHOD = "ANYBATCH_INIT_METHOD"
"""Rendezvous of ranks started by `anybatch train --ranks N`, instead of MASTER_ADDR and MASTER_PORT."""
_FIRST_PORT = 20_000
_NUM_PORTS = 10_000
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A launcher's description of this process: its rank among all processes and among the processes of its host.

    `local_size`: number of processes that share this process's accelerators; `init_method`: the argument of torch's
    `init_process_group`.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    init_method: str = "env://"


def find_launch(*, joined: bool = False) -> Launch | None:
    """Return the launcher's description of this process; None without a launcher.

    RANK and WORLD_SIZE, which torchrun and Kubernetes operators set, take precedence over the variables of srun and
    mpirun, which are used only if they have started several processes. If the processes have `joined` a process group
    already, only local ranks are needed. Raise a `WorldError` if variables contradict each other, or if the address of
    the rendezvous is missing.
    """
    variables = os.environ
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _torch_launch(variables, joined=joined)
    return _slurm_launch(variables) or _mpi_launch(variables, joined=joined)


def launch_id() -> str | None:
    """Return the launcher's name for this job, stable over restarts; None if it has none."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id not in (None, "none"):  # torchrun's default without --rdzv-id
        return run_id
    job, step = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_STEP_ID")
    # A requeued job keeps its number, and numbers its steps (its calls of srun) from 0 again.
    return None if job is None or step is None else f"{job}.{step}"


def is_restarted() -> bool:
    """Return whether the launcher has restarted these ranks after a failure."""
    return any(int(os.environ.get(name, "0")) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def max_restarts() -> int:
    """Return torchrun's limit of restarts after failures; 0 under other launchers, which do not report it."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def set_launch_variables(rank: int, size: int, init_method: str | None = None) -> None:
    """Set torchrun's variables in this process: for a rank on this machine, or for the loop of `check --loop`.

    `init_method` is the rendezvous of the ranks; None if the process group exists already.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_FIRST_PORT))
    if init_method is not None:
        os.environ[_INIT_METHOD] = init_method


def usable_cores() -> int:
    """Return the number of cores that this process may use; in a container it can be below the machine's number."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def listen_at_loopback() -> None:
    """Make the process groups of this process listen on the loopback interface only. For ranks on one machine.

    By default gloo listens on the address of the host name, and NCCL on a network interface. If no loopback
    interface has a name, as on Windows, this changes nothing.

    Source: torch's documentation of `torch.distributed`, "Common environment variables".
    """
    if sys.platform == "win32":
        return
    for _, name in socket.if_nameindex():
        if name.startswith("lo"):
            os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
            return


def _torch_launch(variables: Mapping[str, str], *, joined: bool) -> Launch:
    rank, size = variables.get("RANK"), variables.get("WORLD_SIZE")
    if joined:
        rank, size = rank or "0", size or "1"
    if rank is None or size is None:
        message = (
            f"RANK={rank} and WORLD_SIZE={size}: a launcher sets both. "
            "Start with torchrun, or unset both to run as a single rank."
        )
        raise WorldError(message)
    if not joined and not 0 <= int(rank) < int(size):
        message = f"RANK={rank} must be at least 0 and below WORLD_SIZE={size}. Check the launcher's settings."
        raise WorldError(message)
    return Launch(
        rank=int(rank),
        size=int(size),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        local_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
        init_method=variables.get(_INIT_METHOD, "env://"),
    )


def _slurm_launch(variables: Mapping[str, str]) -> Launch | None:
    """Return srun's description; None outside of srun: a batch script has only some of its variables."""
    size = int(variables.get("SLURM_STEP_NUM_TASKS", "1"))
    if size == 1 or "SLURM_PROCID" not in variables:
        return None
    address = variables.get("MASTER_ADDR") or _first_node(variables["SLURM_STEP_NODELIST"])
    # The same on all hosts, but different for each step of each job.
    number = 31 * int(variables["SLURM_JOB_ID"]) + int(variables["SLURM_STEP_ID"])
    port = variables.get("MASTER_PORT") or str(_FIRST_PORT + number % _NUM_PORTS)
    # A task with dedicated GPUs cannot use other GPUs.
    local_size = 1
    if "SLURM_GPUS_PER_TASK" not in variables:
        local_size = _tasks_on_node(variables["SLURM_STEP_TASKS_PER_NODE"], int(variables["SLURM_NODEID"]))
    return Launch(
        rank=int(variables["SLURM_PROCID"]),
        size=size,
        local_rank=int(variables["SLURM_LOCALID"]),
        local_size=local_size,
        init_method=f"tcp://{address}:{port}",
    )


def _first_node(nodes: str) -> str:
    """Return the first of SLURM's list of nodes: `gpu003` of `gpu[003-007,009],big1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\]\-,]+)[^\]]*\])?([^,]*)", nodes)
    assert match, f"SLURM_STEP_NODELIST={nodes!r} is not a list of nodes"
    return "".join(part or "" for part in match.groups())


def _tasks_on_node(counts: str, node: int) -> int:
    """Return the number of tasks on a node: 2 for node 1 of `4,2(x3)`."""
    counts_by_node: list[int] = []
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        counts_by_node += [int(count)] * int(times.rstrip(")") or "1")
    return counts_by_node[node]


def _mpi_launch(variables: Mapping[str, str], *, joined: bool) -> Launch | None:
    for rank, size, local_rank, local_size in _MPI:
        if rank not in variables or int(variables.get(size, "1")) == 1:
            continue
        address, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
        if not joined and (address is None or port is None):
            message = (
                f"{rank}={variables[rank]} and {size}={variables[size]}: mpirun has started several processes, but "
                "gives no rendezvous. Set MASTER_ADDR to the first host and MASTER_PORT to a free port, in all "
                f"processes (mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500), or unset {size} to run each alone."
            )
            raise WorldError(message)
        return Launch(
            rank=int(variables[rank]),
            size=int(variables[size]),
            local_rank=int(variables.get(local_rank, "0")),
            local_size=int(variables.get(local_size, "1")),
            init_method=f"tcp://{address}:{port}",
        )
    return None


_FOLDER = "ANYBATCH_FORK_SERVER_FOLDER"
_MAX_TEMP_PATH = 70  # bytes: multiprocessing adds 32 for a Unix socket, whose path may have 107 (unix(7)), 103 on macOS


def rank_context(*preload: str) -> ForkServerContext | SpawnContext:
    """Return the multiprocessing context for ranks: forks of a server that has only imported the modules `preload`.

    On systems other than Linux, forking after an import of torch is not safe, so ranks are new processes.
    """
    _choose_temporary_folder()
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def start_fork_server(*preload: str) -> ForkServerContext | SpawnContext:
    """Start the fork server now if it is not running, and return the context that starts ranks.

    The server ends after this process and all ranks. Ctrl-C only reaches the launcher.
    """
    if sys.platform == "linux":
        resource_tracker.ensure_running()  # first: if it fails once the folder exists, no server removes the folder
    context = rank_context(__name__, *preload)
    if isinstance(context, ForkServerContext):
        former = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by ranks
        os.environ[_FOLDER] = get_temp_dir()
        try:
            forkserver.ensure_running()
        finally:
            del os.environ[_FOLDER]
            signal.signal(signal.SIGINT, former)
    return context


def _choose_temporary_folder() -> None:
    """Let multiprocessing use /tmp if the path of TMPDIR is too long for its sockets.

    Python does this from 3.14 on; in earlier versions every process start fails with "AF_UNIX path too long".
    """
    if os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) > _MAX_TEMP_PATH and os.access("/tmp", os.W_OK):  # noqa: S108
        chosen = tempfile.tempdir
        tempfile.tempdir = "/tmp"  # noqa: S108 (mkdtemp makes a private folder in it)
        try:
            get_temp_dir()  # multiprocessing caches this, and ranks inherit it
        finally:
            tempfile.tempdir = chosen


# In the server: remove the launcher's temporary folder at exit, in case the launcher was killed.
if (_folder := os.environ.pop(_FOLDER, None)) is not None:
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
