"""Two-rank programs end in every way, hundreds of times: no aborts, hangs or leftovers, right exit statuses.

An ending is a start and an event. Starts: `torchrun` (an agent keeps the store), `rank_0` (rank 0 keeps it, as under
srun or Kubernetes) and `local` (`anybatch train --ranks 2`). Events: the engine is closed, or not; a rank raises, calls
sys.exit, or is killed; Ctrl-C; the launcher is killed; a process is killed while the ranks start. Steps and moments are
drawn from a seed.

Each process is forked from one that has imported torch, and ends as any interpreter does: at the top of its script,
through atexit and destructors. The fork server of `anybatch train` is started again each time.

    python benchmarks/endings.py [--num 500] [--seed 0] [--only local] [--out benchmarks/results/NAME.md]
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STARTS = ("torchrun", "rank_0", "local")
STRATEGIES = ("all_reduce", "all_reduce", "ddp", "zero1", "fsdp")
NUM_STEPS, LOSS_CALLS = 60, 76  # a rank of `local` calls its loss 75 times, so every fault happens
HANG_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
"""How long the launcher waits for the other rank after one has failed, before it sends SIGTERM."""
EXIT_STATUS, THREADS_LEFT = 7, 11
JOB = "tests.cli.small:job"
AGENT = """
import pathlib, sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pathlib.Path("port.part").write_text(str(store.port))
pathlib.Path("port.part").rename("port")
time.sleep(600)
"""
LAUNCHER = "import sys; from anybatch.cli.main import main; sys.exit(main(sys.argv[1:]))"
RANK = """
import gc, os, signal, sys, threading, time
import torch
import anybatch as ab

def num_threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
torch.manual_seed(0)
before = num_threads()
samples = [{"x": torch.randn(4), "label": i % 3} for i in range(64)]
model = torch.nn.Sequential(torch.nn.Linear(4, 3))
loss = ab.mean_over_samples(lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["label"]))
make = lambda named: torch.optim.SGD(named, lr=0.1)
engine = ab.Engine(model, make, loss, micro_batch_size=8, strategy=os.environ["STRATEGY"])
for batch in ab.batches(samples, effective_batch_size=32, steps=int(os.environ["STEPS"])):
    if engine.num_steps == int(os.environ["AT"]):
        exec(os.environ["EVENT"])
    engine.step(batch)
exec(os.environ["LAST"])
"""
CLOSED = """
engine.close()
del engine, model
gc.collect()
# Torch caches specifications of DTensors, whose mesh keeps the default group: three threads of gloo, and the thread of
# the store where this rank serves it. More engines add none.
expected = before + (4 if os.environ["STRATEGY"] == "fsdp" else 0)
deadline = time.monotonic() + 5
while num_threads() > expected and time.monotonic() < deadline:
    time.sleep(0.01)
if num_threads() > expected:
    sys.stderr.write(f"threads left: {num_threads() - expected}\\n")
    sys.exit(THREADS_LEFT)
""".replace("THREADS_LEFT", str(THREADS_LEFT))
ON_RANK_1 = "if os.environ['RANK'] == '1': "


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event that ends a program.

    Attributes:
        in_step: function that a rank calls before a randomly drawn step, under `torchrun` and `rank_0`.
        fault: the same fault in `tests.cli.small`, under `local`; None if it cannot happen there.
        last: function that a rank calls after its last step.
        signals: signals from outside to "ranks", "rank 1" or "launcher", at a random moment.
        max_delay_seconds: the latest moment.
        statuses: the right exit statuses of rank 0 and rank 1.
        local_statuses: the right exit statuses of `anybatch train`.
    """

    in_step: str = ""
    fault: str | None = ""
    last: str = CLOSED
    signals: tuple[str, signal.Signals] | None = None
    max_delay_seconds: float = 1.5
    statuses: tuple[tuple[int, ...], tuple[int, ...]]
    local_statuses: tuple[int, ...] = ()


EVENTS = {
    "closed": Event(statuses=((0,), (0,)), local_statuses=(0,)),
    "not closed": Event(last="", fault=None, statuses=((0,), (0,))),
    "exception on one rank": Event(
        in_step=ON_RANK_1 + "raise ValueError('mine')",
        fault="raise:{call}:1",
        statuses=((1,), (1,)),
        local_statuses=(1,),
    ),
    "exception on both": Event(in_step="raise ValueError('mine')", fault=None, statuses=((1,), (1,))),
    "sys.exit on one rank": Event(
        in_step=ON_RANK_1 + f"sys.exit({EXIT_STATUS})",
        fault="exit:{call}:1",
        statuses=((1,), (EXIT_STATUS,)),
        local_statuses=(1,),
    ),
    "sys.exit on both": Event(in_step=f"sys.exit({EXIT_STATUS})", fault=None, statuses=((EXIT_STATUS,),) * 2),
    "Ctrl-C": Event(
        signals=("ranks", signal.SIGINT), last="", statuses=((0, 1, -2, -15),) * 2, local_statuses=(0, 3, 130, -2)
    ),
    "launcher killed": Event(
        signals=("launcher", signal.SIGKILL), last="", statuses=((0, 1), (0, 1)), local_statuses=(-9, 0)
    ),
    "launcher killed in a step": Event(
        fault="kill_launcher:{call}:0", signals=None, last="", statuses=((0,), (0,)), local_statuses=(-9,)
    ),
    "rank killed": Event(
        in_step=ON_RANK_1 + "os.kill(os.getpid(), signal.SIGKILL)",
        fault="kill:{call}:1",
        statuses=((1,), (-9,)),
        local_statuses=(6,),
    ),
    "killed while starting": Event(
        signals=("rank 1", signal.SIGKILL),
        max_delay_seconds=0.3,
        last="",
        statuses=((0, 1, -15), (0, 1, -9)),
        local_statuses=(-9, 6, 0),
    ),
}


@dataclass(slots=True)
class Outcome:
    """The outcome of one ending.

    Attributes:
        faults: all faults, as short texts that can be counted.
        seconds: from the start of the first process to the end of the last.
        detail: statuses and outputs.
    """

    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    detail: str = ""


class Forks:
    """A process that has imported torch, from which programs are forked; used by several threads."""

    def __init__(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipe, self._lock = ours, threading.Lock()
        fd = theirs.fileno()
        os.set_inheritable(fd, True)  # noqa: FBT003 (it takes no name)
        self._pid = os.spawnve(  # noqa: S606 (a fixed program)
            os.P_NOWAIT,
            sys.executable,
            [sys.executable, __file__, "--serve", str(fd)],
            {**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def start(self, program: str, arguments: Sequence[str], variables: Mapping[str, str], folder: Path) -> int:
        """Start a program in its own session and folder; return its process id."""
        return int(self._ask("start", program, list(arguments), dict(variables), str(folder)))

    def status(self, pid: int) -> int | None:
        """Return the exit status of a process, below 0 for a signal; None while it runs."""
        found: int | None = self._ask("status", pid)
        return found

    def close(self) -> None:
        """End the server."""
        self._pipe.close()
        os.waitpid(self._pid, 0)

    def _ask(self, *order: object) -> Any:  # noqa: ANN401 (an answer)
        with self._lock:
            self._pipe.send(order)
            return self._pipe.recv()


def serve(pipe: Connection) -> str:
    """Fork programs until the pipe closes; in a forked process, return the program to run."""
    import torch._dynamo  # noqa: F401, PLC0415

    import anybatch.cli.local_ranks  # noqa: F401, PLC0415

    statuses: dict[int, int] = {}
    while True:
        try:
            kind, *order = pipe.recv()
        except EOFError:
            return ""
        if kind == "status":
            pid = order[0]
            if pid not in statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            pipe.send(statuses.get(pid))
            continue
        pid = os.fork()
        if pid:
            statuses.pop(pid, None)  # process ids are reused
            pipe.send(pid)
            continue
        pipe.close()
        program, arguments, variables, folder = order
        become(arguments, variables, folder)
        return str(program)


def become(arguments: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
    """Turn a fork into a separate process with its own session, folder, output, arguments and environment."""
    os.setsid()
    os.chdir(folder)
    output = os.open(f"output-{os.getpid()}", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(variables)
    tempfile.tempdir = None
    sys.argv = ["program", *arguments]
    sys.path.insert(0, str(ROOT))


def processes_of(sessions: Sequence[int]) -> list[int]:
    """Return the running processes of some sessions."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            state, _, _, session, *_ = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(session) in sessions and state not in "ZX":
            found.append(int(path.name))
    return found


@dataclass(slots=True)
class Run:
    """One ending, while it runs."""

    forks: Forks
    start: str
    event: Event
    drawn: random.Random
    folder: Path
    outcome: Outcome = field(default_factory=Outcome)

    def play(self) -> Outcome:
        """Run the ending, and return its outcome."""
        begun = time.monotonic()
        temporary = self.folder / "tmp"
        temporary.mkdir()
        variables = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        launcher, ranks = self._start(variables)
        started = [*ranks, *([launcher] if launcher else [])]
        if self.event.signals is not None:
            self._send(launcher, ranks)
        statuses = self._wait(launcher, ranks, begun)
        while (left := processes_of(started)) and time.monotonic() < begun + HANG_SECONDS:
            time.sleep(0.05)
        self.outcome.seconds = time.monotonic() - begun
        if left:
            self.outcome.faults.append("processes left")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        if any(temporary.iterdir()):
            self.outcome.faults.append("folders left")
        self._judge(statuses)
        outputs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("output-*"))]
        left_names = [path.name for path in temporary.iterdir()]
        self.outcome.detail = (
            f"{variables.get('STRATEGY', '')} statuses {statuses}, left {left_names}\n" + "\n--\n".join(outputs)
        )
        return self.outcome

    def _start(self, variables: dict[str, str]) -> tuple[int | None, list[int]]:
        if self.start == "local":
            call = self.drawn.randrange(1, LOSS_CALLS)
            variables["ANYBATCH_TEST_FAULT"] = (self.event.fault or "").format(call=call)
            arguments = ["train", JOB, "--ranks", "2", "--micro-batch-size", "1", "--out", "run"]
            return self.forks.start(LAUNCHER, arguments, variables, self.folder), []
        launcher = None
        if self.start == "torchrun":
            launcher = self.forks.start(AGENT, [], variables, self.folder)
            while not (self.folder / "port").exists():
                time.sleep(0.005)
            port = (self.folder / "port").read_text()
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        else:
            port = str(self.drawn.randrange(20_000, 30_000))
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"EVENT": self.event.in_step or "pass", "LAST": self.event.last or "pass"}
        variables |= {"STRATEGY": self.drawn.choice(STRATEGIES), "AT": str(self.drawn.randrange(NUM_STEPS))}
        variables |= {"STEPS": str(NUM_STEPS), "GLOO_SOCKET_IFNAME": "lo"}
        own = [{**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        return launcher, [self.forks.start(RANK, [], each, self.folder) for each in own]

    def _send(self, launcher: int | None, ranks: list[int]) -> None:
        assert self.event.signals is not None
        whom, number = self.event.signals
        slower = 4.0 if self.start == "local" else 1.0  # its fork server imports torch first
        time.sleep(self.drawn.uniform(0.0, slower * self.event.max_delay_seconds))
        chosen: list[int | None] = [*ranks] or [launcher]
        if whom == "launcher" and launcher:
            chosen = [launcher]
        elif whom == "rank 1":
            chosen = chosen[-1:]
        times = self.drawn.choice((1, 2)) if self.start == "local" and number == signal.SIGINT else 1
        for _ in range(times):
            for pid in chosen:
                if pid and self.forks.status(pid) is None:
                    os.kill(pid, number)
            time.sleep(0.1)

    def _wait(self, launcher: int | None, ranks: list[int], begun: float) -> list[int | None]:
        """Wait as a launcher does, sending SIGTERM to the others after a failure. Return the ranks' statuses."""
        waited = ranks or ([launcher] if launcher else [])
        failed_at = None
        while True:
            statuses = [self.forks.status(pid) for pid in waited]
            now = time.monotonic()
            if None not in statuses:
                break
            if now > begun + HANG_SECONDS:
                self.outcome.faults.append("hang")
                break
            if failed_at is None and any(statuses):
                failed_at = now
            if failed_at is not None and now > failed_at + PATIENCE_SECONDS:
                for pid, status in zip(waited, statuses, strict=True):
                    if status is None:
                        os.kill(pid, signal.SIGTERM)
                failed_at = now
            time.sleep(0.02)
        if launcher is not None and ranks and self.forks.status(launcher) is None:
            os.kill(launcher, signal.SIGKILL)  # the agent, whose store is no longer needed
        return statuses

    def _judge(self, statuses: Sequence[int | None]) -> None:
        right = self.event.statuses if self.start != "local" else (self.event.local_statuses,)
        if any(status in (-signal.SIGABRT, -signal.SIGSEGV) for status in statuses):
            self.outcome.faults.append("abort")
        elif any(status == THREADS_LEFT for status in statuses):
            self.outcome.faults.append("threads left")
        elif any(status is not None and status not in each for status, each in zip(statuses, right, strict=True)):
            self.outcome.faults.append("wrong status")


def play(forks: Forks, start: str, name: str, seed: int) -> Outcome:
    """Run one ending in its own folder."""
    folder = Path(tempfile.mkdtemp(prefix="endings-"))
    try:
        return Run(forks, start, EVENTS[name], random.Random(seed), folder).play()  # noqa: S311 (no secret)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def campaign(num: int, seed: int, only: str) -> list[str]:
    """Run this many endings, two at a time, and return the lines of a table."""
    kinds = [
        (start, name)
        for start in STARTS
        for name, event in EVENTS.items()
        if (event.fault is not None or start != "local")
        and not (start == "rank_0" and event.signals and event.signals[0] == "launcher")
        and only in f"{start}: {name}"
    ]
    chosen = [kinds[number % len(kinds)] for number in range(num)]
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    forks = Forks()

    def one(number: int) -> None:
        start, name = chosen[number]
        outcome = play(forks, start, name, seed + number)
        found[start, name].append(outcome)
        if outcome.faults:
            sys.stderr.write(f"{start}: {name}, seed {seed + number}: {outcome.faults}\n{outcome.detail}\n")

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(one, range(num)))
    finally:
        forks.close()
    lines = ["| start | event | endings | median seconds | longest | faults |", "|---|---|---|---|---|---|"]
    for (start, name), outcomes in sorted(found.items()):
        seconds = sorted(outcome.seconds for outcome in outcomes)
        faults = Counter(fault for outcome in outcomes for fault in outcome.faults)
        arguments = ", ".join(f"{fault} {times}" for fault, times in faults.items()) or "0"
        middle = seconds[len(seconds) // 2]
        lines.append(f"| {start} | {name} | {len(seconds)} | {middle:.1f} | {seconds[-1]:.1f} | {arguments} |")
    total = sum(bool(outcome.faults) for outcomes in found.values() for outcome in outcomes)
    return [*lines, "", f"{num} endings, {total} with faults."]


def run() -> None:
    """Read the command line, and run the campaign."""
    import report  # noqa: PLC0415 (brings torch, which the forks import themselves)

    options = report.parser(__doc__)
    options.add_argument("--num", type=int, default=500)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="endings whose name has this, such as 'local' or 'rank_0: closed'")
    given = options.parse_args()
    command = f"python benchmarks/endings.py --num {given.num} --seed {given.seed}"
    lines = campaign(given.num, given.seed, given.only)
    report.publish(lines, title="Endings of two ranks", command=command, setting="two ranks", out=given.out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        source = serve(Connection(int(sys.argv[2])))
        if source:
            exec(compile(source, "program", "exec"))  # noqa: S102 (one of the programs above)
    else:
        run()
