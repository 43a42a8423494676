"""Local ranks: the addresses they listen at, their leftovers, and how they end."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import pytest

from anybatch.cli.status import Status
from tests.architecture.source_tree import PACKAGE, ROOT
from tests.cli.small import FAULT, SPEC, logged, run
from tests.cli.test_processes import IN_STEP_10, TIMEOUT_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
LISTENS, LOOKS_EACH_SECONDS = "0A", 0.05
SERVERS = {"guide": ["guide", "--no-browser"], "watch": ["watch", "--no-browser"]}
TRAIN = ["train", "digits", "--ranks", "2", "--steps", "2", "--micro-batch-size", "64", "--out", "run"]
ORPHAN = """
import multiprocessing, os, signal
from anybatch.cli import local_ranks

local_ranks._SECONDS_WITHOUT_LAUNCHER = 0.0

def rank():
    import threading
    joined = threading.Event()
    joined.set()
    threading.Thread(target=local_ranks._end_without_launcher, args=(joined,), daemon=True).start()
    threading.Event().wait()

multiprocessing.get_context("fork").Process(target=rank).start()
os.kill(os.getpid(), signal.SIGKILL)
"""
ORDER = """
import sys
from multiprocessing import forkserver, resource_tracker, util
from anybatch.parallel import launchers

def noted(name, function):
    def call():
        print(name)
        return function()
    return call

resource_tracker.ensure_running = noted("tracker", resource_tracker.ensure_running)
launchers.get_temp_dir = noted("folder", launchers.get_temp_dir)
forkserver.ensure_running = noted("server", lambda: None)
launchers.start_fork_server()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short name: in pytest's, the names of sockets can be too long."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as name:
        (Path(name) / "tmp").mkdir()
        yield Path(name)


@contextmanager
def started(folder: Path, *words: str, temporary: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """Start `anybatch` in its own session and folder; kill the session at the end."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary or folder / "tmp")}
    env["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), str(ROOT), str(ROOT / "guide" / "src")])
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(  # noqa: S603 (a fixed program)
            [sys.executable, "-m", "anybatch", *words],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in members(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def members(session: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                state, _, _, own, *_ = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found += [int(path.name)] if int(own) == session and state not in "ZX" else []
    return found


def listening(session: int) -> set[str]:
    """Return the addresses at which the processes of a session listen."""
    sockets = set()
    for pid in members(session):
        try:
            sockets |= {str(handle.readlink()) for handle in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                # The kernel prints words of four bytes in native byte order.
                turned = b"".join(
                    words[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(words), 4)
                )
                found.add(socket.inet_ntop(family, turned))
    return found


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    parsed = ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


@pytest.mark.slow
def test_a_run_on_two_ranks(folder: Path) -> None:
    """No process can be reached from another machine, TMPDIR may be too long for a Unix socket, and nothing remains."""
    long = folder / ("a" * 120)
    long.mkdir()
    with started(folder, *TRAIN, temporary=long) as process:
        seen = addresses_until(process, lambda _: False)
        assert process.returncode == Status.DONE, (folder / "output").read_text()
        assert wait_for_end(process.pid) == []
    assert seen
    assert all(map(is_loopback, seen)), seen
    assert not [path for path in long.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own cache


@pytest.mark.slow
@pytest.mark.parametrize("command", SERVERS)
def test_no_server_listens_beyond_loopback(folder: Path, command: str) -> None:
    """The guide and `watch` cannot be reached from another machine."""
    if command == "watch":
        run(folder / "runs" / "small", stop_after=1)
    with started(folder, *SERVERS[command]) as process:
        seen = addresses_until(process, bool)
    assert seen, (folder / "output").read_text()
    assert all(map(is_loopback, seen)), seen


def addresses_until(process: "subprocess.Popen[str]", is_enough: Callable[[set[str]], bool]) -> set[str]:
    """Return the addresses at which the processes of a session have listened until these are enough, or it ends."""
    seen: set[str] = set()
    while not is_enough(seen):
        seen |= listening(process.pid)
        try:
            process.wait(LOOKS_EACH_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    return seen


@pytest.mark.slow
def test_nothing_remains_of_a_killed_launcher(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If their launcher is killed, ranks end after the step and remove its temporary folder."""
    monkeypatch.setenv(FAULT, f"kill_launcher:{IN_STEP_10[2]}:0")
    with started(folder, "train", SPEC, "--ranks", "2", "--micro-batch-size", "1", "--out", "run") as process:
        assert process.wait(TIMEOUT_SECONDS) == -signal.SIGKILL
        assert wait_for_end(process.pid) == []
        assert not list((folder / "tmp").iterdir())
    assert logged(folder / "run", "end")[-1]["status"] == "stopped"


def wait_for_end(session: int) -> list[int]:
    """Wait for the processes of a session to end; return the remaining ones."""
    for pid in members(session):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([handle], [], [], TIMEOUT_SECONDS)
        os.close(handle)
    return members(session)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_without_its_launcher() -> None:
    """A rank whose main thread hangs is killed some time after its launcher died."""
    done = subprocess.run(  # noqa: S603 (a fixed program)
        [sys.executable, "-c", ORPHAN],
        capture_output=True,  # returns once the rank, which shares the output, has ended too
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_the_temporary_folder_is_created_just_before_the_fork_server() -> None:
    """Nobody removes the folder of a launcher killed before its server exists, so nothing slow comes between."""
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, check=True)  # noqa: S603 (ours)
    assert done.stdout.split() == ["tracker", "folder", "server"]
