"""Hosts with links of 1 Gbit/s and 1 ms: every launcher, a host that is killed within a step, and a host that joins.

Hosts are network namespaces of this machine (`tests/hosts.py`; root, iproute2). One recipe runs on one host and,
started by torchrun, by srun, by the variables of a Kubernetes operator and by Ray Train, on several, one rank on each.
Its final parameters are compared with a run on one host, in float64; the benchmark counts how often each sample of each
epoch is in the steps that led to these parameters. srun belongs to a SLURM that is started on these hosts (Debian:
slurmctld slurmd slurm-client munge, and cgroups of version 1); Ray's workers run on this machine itself
(`anybatch[ray]`). Then elastic runs of torchrun lose a host within a step, by a signal or by its cable, and another run
gets a new host.

    python benchmarks/several_hosts.py [--only "comes later" --hosts 3] [--out benchmarks/results/NAME.md]
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import report
import torch

from anybatch.core.run_config import RunConfig
from anybatch.events.jsonl import read_jsonl
from anybatch.parallel.world import World
from anybatch.recipes.session import train
from anybatch.testing import relative_error

sys.path.insert(0, str(Path(__file__).parents[1]))  # the hosts and the job come from the tests
from tests.cli.small import NUM_SAMPLES, SPEC, STEPS_PER_EPOCH, job, parameters, samples_of_steps
from tests.hosts import Host, NoHostsError, hosts

ROOT = Path(__file__).parents[1]
RATE, LATENCY = "1gbit", 0.001
SHORT, LONG, LONGEST = 10, 150, 600  # epochs
BEFORE_THE_EVENT = 300  # steps
TIMEOUT_SECONDS = 1_200
SLURM_CONF = """
ClusterName=hosts
SlurmctldHost=host0({first})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
Agents = list["subprocess.Popen[str]"]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of each rank."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def training(folder: Path, epochs: int) -> list[str]:
    """Return the arguments of `python`: one sample at a time, so that logs name every sample."""
    return ["-m", "anybatch", "train", SPEC, "--micro-batch-size", "1", "--epochs", str(epochs), "--out", str(folder)]


def torchrun(host: Host, folder: Path, nodes: str, epochs: int) -> "subprocess.Popen[str]":
    """Start torchrun's agent on a host."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-conf", "last_call_timeout=3"]
    elastic = ["--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "job", *meeting]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, *training(folder, epochs)]
    # torchrun 2.13 shares the first round's store, and does not send its address to later hosts.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return host.start(command, env=environment(**own_store), out=output(folder, host))


def output(folder: Path, host: Host) -> int:
    """Return an open file for a host's output."""
    return os.open(folder.with_name(f"{folder.name}.{host.name}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def end(agents: Agents, folder: Path) -> None:
    """Wait for launchers to end successfully."""
    for agent in agents:
        if agent.wait(TIMEOUT_SECONDS):
            texts = [path.read_text()[-2000:] for path in folder.parent.glob(f"{folder.name}.*")]
            raise RuntimeError("\n".join([f"{agent.args!r} ended with status {agent.returncode}", *texts]))


def with_torchrun(made: list[Host], folder: Path) -> None:
    """Run on hosts with torchrun."""
    end([torchrun(host, folder, str(len(made)), SHORT) for host in made], folder)


def with_kubernetes(made: list[Host], folder: Path) -> None:
    """Run with the variables that a PyTorchJob sets in its pods."""
    common = {"MASTER_ADDR": made[0].name, "MASTER_PORT": "23456", "WORLD_SIZE": str(len(made))}
    command = [sys.executable, *training(folder, SHORT), "--resume", "auto"]
    pods = [
        host.start(command, env=environment(**common, RANK=str(rank)), out=output(folder, host))
        for rank, host in enumerate(made)
    ]
    end(pods, folder)


def with_srun(made: list[Host], folder: Path) -> None:
    """Run with srun, in a SLURM on these hosts."""
    place = folder.with_name(f"{folder.name}-slurm")
    place.mkdir()
    nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs=2" for host in made)
    conf = place / "slurm.conf"
    conf.write_text(SLURM_CONF.format(first=made[0].address, folder=place, nodes=nodes))
    (place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    env = environment(SLURM_CONF=str(conf))
    made[0].start(["slurmctld", "-D", "-f", str(conf)], env=env, out=output(place, made[0]))
    for host in made:
        (place / f"spool-{host.name}").mkdir()
        host.start(["slurmd", "-D", "-f", str(conf), "-N", host.name], env=env, out=output(place, host))
    tasks = ["srun", f"--nodes={len(made)}", f"--ntasks={len(made)}", "--mpi=none"]
    command = [*tasks, sys.executable, *training(folder, SHORT)]
    end([made[0].start(command, env=env, out=output(folder, made[0]))], folder)


def why_not_srun() -> str:
    """Return the reason why SLURM cannot be started here; empty if it can."""
    missing = [name for name in ("slurmctld", "slurmd", "srun", "munged") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not Path("/sys/fs/cgroup/freezer").is_dir():
        return "no cgroups of version 1 in /sys/fs/cgroup"
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    command = ["runuser", "-u", "munge", "--", "munged"]
    subprocess.run(command, check=False, capture_output=True)
    return ""


def in_a_worker(config: dict[str, str]) -> None:
    """Train in a worker of Ray, with the world of torch.distributed."""
    world = World.from_environment(device="cpu")
    train(job(), config["folder"], RunConfig(micro_batch_size=1, epochs=SHORT), world=world, stop=lambda: False)


def with_ray(made: list[Host], folder: Path) -> None:
    """Run in the same number of workers of Ray Train, in a cluster of this machine."""
    import ray  # noqa: PLC0415 (an extra)
    from ray.train import ScalingConfig  # noqa: PLC0415
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    variables = {"env_vars": {"PYTHONPATH": environment()["PYTHONPATH"], "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=len(made) + 1, runtime_env=variables, log_to_driver=False, logging_level="error")
    try:
        scaling = ScalingConfig(num_workers=len(made))
        TorchTrainer(in_a_worker, train_loop_config={"folder": str(folder)}, scaling_config=scaling).fit()
    finally:
        ray.shutdown()


def why_not_ray() -> str:
    """Return the reason why Ray cannot be used here; empty if it can."""
    return "" if importlib.util.find_spec("ray") else "not installed"


def sessions(folder: Path) -> list[tuple[int, int]]:
    """Return the first step and the number of ranks of each session in rank 0's log."""
    log = folder / "events.jsonl"
    lines = read_jsonl(log) if log.exists() else []
    return [(line["first_step"], line["world_size"]) for line in lines if line["kind"] == "start"]


def newest_step(folder: Path) -> int:
    """Return the newest step in the newest session of rank 0's log; -1 if it is empty."""
    log = folder / "events.jsonl"
    newest = -1
    for line in read_jsonl(log) if log.exists() else []:
        newest = {"step": line.get("step"), "start": -1}.get(line["kind"], newest)
    return newest


def wait_for_step(folder: Path, step: int, num_sessions: int) -> None:
    """Wait for a step in that session of a run."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while len(sessions(folder)) < num_sessions or newest_step(folder) < step:
        if time.monotonic() > until:
            message = f"{folder} did not come to step {step} of session {num_sessions}"
            raise RuntimeError(message)
        time.sleep(0.05)


def times_used(folder: Path) -> str:
    """Return, as text, how often each sample of an epoch was used for the final parameters."""
    steps = samples_of_steps(folder)
    counts: set[int] = set()
    for first in range(0, len(steps), STEPS_PER_EPOCH):
        used = Counter(sample for step in range(first, first + STEPS_PER_EPOCH) for sample in steps[step])
        counts |= {used[sample] for sample in range(NUM_SAMPLES)}
    return ", ".join(map(str, sorted(counts)))


def error_of(folder: Path, reference: Path) -> str:
    """Return the largest relative difference of the parameters of two runs."""
    return f"{relative_error(parameters(folder), parameters(reference)):.1e}"


def a_host_is_killed(made: list[Host], folder: Path) -> str:
    """Kill all programs of the last host within a step; return the seconds until the others' next step."""
    agents = [torchrun(host, folder, f"1:{len(made)}", LONG) for host in made]
    wait_for_step(folder, BEFORE_THE_EVENT, 1)
    made[-1].kill()
    begun, before = time.monotonic(), newest_step(folder)
    wait_for_step(folder, 0, 2)
    seconds = time.monotonic() - begun
    end(agents[:-1], folder)
    agents[-1].wait()
    return f"{seconds:.0f} s, {before + 1 - sessions(folder)[1][0]} steps again"


def a_host_comes(made: list[Host], folder: Path) -> str:
    """Start an elastic run without the last host, then add that host; return the seconds until all hosts train."""
    agents = [torchrun(host, folder, f"1:{len(made)}", LONGEST) for host in made[:-1]]
    wait_for_step(folder, BEFORE_THE_EVENT, 1)
    before = newest_step(folder)
    agents.append(torchrun(made[-1], folder, f"1:{len(made)}", LONGEST))
    begun = time.monotonic()
    wait_for_step(folder, 0, 2)
    seconds = time.monotonic() - begun
    end(agents, folder)
    return f"{seconds:.0f} s, {max(0, before + 1 - sessions(folder)[1][0])} steps again"


def run(num_hosts: int, what: Callable[[list[Host], Path], object], folder: Path) -> object:
    """Create hosts, and run a function on them."""
    with hosts(num_hosts, rate=RATE, latency=LATENCY) as made:
        return what(made, folder)


def round_trip(num_words: int = 200, **switch: float) -> float:
    """Return the milliseconds of a message and its answer between hosts."""
    listen = "import socket; c = socket.create_server(('0.0.0.0', 5000)).accept()[0]\nwhile d := c.recv(1): c.send(d)"
    ask = (
        "import socket, time\nwhile True:\n    try: s = socket.create_connection(('host0', 5000)); break\n"
        "    except ConnectionRefusedError: pass\ns.setsockopt(6, 1, 1)\nb = time.perf_counter()\n"
        f"for _ in range({num_words}): s.send(b'x'); s.recv(1)\nprint((time.perf_counter() - b) / {num_words})"
    )
    with hosts(2, rate=RATE, **switch) as (first, second):  # type: ignore[arg-type]
        first.start([sys.executable, "-c", listen], env=os.environ)
        asking = second.start([sys.executable, "-c", ask], env=os.environ, out=subprocess.PIPE)
        return 1000 * float(asking.communicate(timeout=TIMEOUT_SECONDS)[0])


def main() -> None:
    """Run everything, and print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--only", default="", help="launchers with these words in their name")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3])
    given = parser.parse_args()
    trips = round_trip(), round_trip(held_back=True), round_trip(latency=LATENCY)
    switch = (
        f"A word and its answer take {trips[0]:.2f} ms over the kernel's bridge, {trips[1]:.2f} ms through the process "
        f"that holds frames back, when it does not, and {trips[2]:.2f} ms when it does so for {LATENCY * 1000:g} ms."
    )
    columns = (
        "launcher",
        "hosts",
        "parameters against one host",
        "a sample of an epoch is used",
        "until the next step",
    )
    lines = [switch, "", f"| {' | '.join(columns)} |", "|---|--:|--:|--:|--:|"]
    launchers: dict[str, tuple[Callable[[list[Host], Path], object], int, str]] = {
        "torchrun": (with_torchrun, SHORT, ""),
        "srun": (with_srun, SHORT, why_not_srun()),
        "variables of a PyTorchJob": (with_kubernetes, SHORT, ""),
        "Ray Train": (with_ray, SHORT, why_not_ray()),
        "torchrun, elastic; one is killed within a step": (a_host_is_killed, LONG, ""),
        "torchrun, elastic; the last one comes later": (a_host_comes, LONGEST, ""),
    }
    launchers = {name: one for name, one in launchers.items() if given.only in name}
    with tempfile.TemporaryDirectory() as root, contextlib.suppress(KeyboardInterrupt):
        reference = {epochs: Path(root, f"one-host-{epochs}") for _, epochs, _ in launchers.values()}
        for epochs, folder in reference.items():
            train(job(), folder, RunConfig(micro_batch_size=1, epochs=epochs), world=World(), stop=lambda: False)
        for name, (what, epochs, reason) in launchers.items():
            for num_hosts in given.hosts:
                if reason:
                    lines.append(f"| {name} | {num_hosts} | not run: {reason} | | |")
                    continue
                folder = Path(root, f"{what.__name__}-{num_hosts}")
                found = run(num_hosts, what, folder) or ""
                error = error_of(folder, reference[epochs])
                lines.append(f"| {name} | {num_hosts} | {error} | {times_used(folder)} time | {found} |")
                print(lines[-1], flush=True)
    report.publish(
        lines,
        title="Several hosts: launchers, and hosts that go and come",
        command="python benchmarks/several_hosts.py",
        setting=f"{torch.get_num_threads()} threads, network namespaces, {RATE} per cable",
        out=given.out,
    )


if __name__ == "__main__":
    try:
        main()
    except NoHostsError as error:
        sys.exit(str(error))
