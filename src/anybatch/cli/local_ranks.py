"""Start several ranks on this machine, wait for them, and print an error only once.

The ranks rendezvous in a file that only this user can read and write, and listen on loopback only.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anybatch.cli.launch import join, print_stopping, run_rank
from anybatch.cli.status import ErrorValues, Status, error_values, explain
from anybatch.cli.train import PRELOADED, TrainRequest
from anybatch.errors import RankFailedError
from anybatch.parallel.launchers import listen_at_loopback, set_launch_variables, start_fork_server, usable_cores
from anybatch.recipes.session import StopRequest

_UNKNOWN = -1
_MAX_ERROR_LETTERS = 2000
_MAX_ERROR_BYTES = 6 * _MAX_ERROR_LETTERS + 1000
_SECONDS_AFTER_FAILURE = 10.0
"""Time for the other ranks to exit after one fails; then the launcher kills them."""
_SECONDS_WITHOUT_LAUNCHER = 30.0
"""Time for a rank to save and exit after the launcher dies; then it kills itself."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory that the launcher shares with its ranks.

    Attributes:
        stop: nonzero after a request to stop.
        statuses: exit status of each rank; `_UNKNOWN` until a rank reports one.
        last_error: values of a rank's error as JSON; of a rank that lost the connection only if there is no other.
        num_threads: torch threads of each rank.
    """

    stop: Any
    statuses: Any
    last_error: Any
    num_threads: int


def run_local_ranks(request: TrainRequest, num_ranks: int) -> tuple[Status, ErrorValues]:
    """Start ranks on this machine, wait for them, and return the exit status and the values of an error."""
    context = start_fork_server(*PRELOADED)
    shared = SharedState(
        stop=context.RawValue("b", 0),
        statuses=context.RawArray("i", [_UNKNOWN] * num_ranks),
        last_error=context.RawArray("c", _MAX_ERROR_BYTES),
        num_threads=threads_per_rank(num_ranks),
    )
    # multiprocessing's temporary folder is private to this user and removed after all processes have ended.
    store = Path(get_temp_dir(), f"store-{uuid.uuid4().hex}")
    store.touch()
    ranks = [context.Process(target=rank_main, args=(request, shared, n, num_ranks, store)) for n in range(num_ranks)]

    def ask(number: signal.Signals) -> None:
        shared.stop.value = 1
        print_stopping(number)

    with StopRequest(ask):
        try:
            exit_codes = _run(ranks)
        except KeyboardInterrupt as error:
            sys.stderr.write(f"{explain(error)}\n")
            return Status.INTERRUPTED, error_values(error)
    status, message = exit_status_of(list(shared.statuses), exit_codes)
    values = error_values(RankFailedError(message)) if message else json.loads(shared.last_error.value or "{}")
    if status is Status.RANKS:
        sys.stderr.write(f"anybatch: {values.get('message', '')}\n")
    return status, values


def _run(ranks: Sequence[BaseProcess]) -> dict[int, int]:
    """Run processes to their end; if one fails, kill the others after a grace period.

    Returns:
        The nonzero exit code of each rank that failed before the deadline, by rank, first failure first.
    """
    failed: dict[int, int] = {}
    running = dict(enumerate(ranks))
    deadline: float | None = None
    try:
        for process in ranks:
            process.start()
        while running and (deadline is None or time.monotonic() < deadline):
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            wait([process.sentinel for process in running.values()], timeout)
            for rank, process in list(running.items()):
                if process.exitcode is not None:
                    del running[rank]
                    failed |= {rank: process.exitcode} if process.exitcode else {}
            if failed and deadline is None:
                deadline = time.monotonic() + _SECONDS_AFTER_FAILURE
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    return failed


def rank_main(request: TrainRequest, shared: SharedState, rank: int, num_ranks: int, store: Path) -> None:
    """Run one rank in a process started by the launcher."""
    joined = threading.Event()
    threading.Thread(target=_end_without_launcher, args=(joined,), name="anybatch launcher", daemon=True).start()
    torch.set_num_threads(shared.num_threads)
    set_launch_variables(rank, num_ranks, _lasting_path(store).as_uri())
    listen_at_loopback()
    signals = _catch_signals()
    try:
        world = join()
    except Exception as error:  # noqa: BLE001 (the launcher prints it)
        status, values = Status.RANKS, error_values(error)
    else:
        joined.set()
        status, values = run_rank(
            request, world, lambda: bool(shared.stop.value or signals or not _launcher_lives()), is_watched=True
        )
    if values and (status is not Status.RANKS or not shared.last_error.value):
        values["message"] = values["message"][:_MAX_ERROR_LETTERS]
        shared.last_error.value = json.dumps(values).encode()
    if status in (Status.DONE, Status.STOPPED):
        dist.destroy_process_group()
    shared.statuses[rank] = status
    if status not in (Status.DONE, Status.STOPPED):
        sys.exit(status)


def _lasting_path(store: Path) -> Path:
    """Return a path to the store that stays valid after the file is removed (Linux only).

    Otherwise a late rank would hang: torch waits for a missing file without releasing the GIL.
    """
    path = Path(f"/proc/self/fd/{os.open(store, os.O_RDWR)}")
    return path if path.exists() else store


def threads_per_rank(num_ranks: int) -> int:
    """Return the number of torch threads per rank, so that all ranks together have at most one thread per core."""
    # torch's number is smaller if the user has set OMP_NUM_THREADS.
    return min(torch.get_num_threads(), max(1, usable_cores() // num_ranks))


def exit_status_of(statuses: Sequence[int], exit_codes: Mapping[int, int]) -> tuple[Status, str]:
    """Return the exit status of a run, and a message if a rank died without reporting its status (else empty).

    Args:
        statuses: status of each rank; below 0 if the rank reported none.
        exit_codes: exit codes of the ranks that failed first; below 0 for a signal.
    """
    known = [Status(status) for status in statuses if status >= 0]
    first = [Status(statuses[rank]) for rank in exit_codes if statuses[rank] >= 0]
    for status in (*first, *known):
        if status not in (Status.DONE, Status.STOPPED, Status.RANKS):
            return status, ""
    for rank, code in exit_codes.items():
        if statuses[rank] < 0:
            return Status.RANKS, f"rank {rank} {_how_it_ended(code)} The other ranks were stopped too."
    if Status.RANKS in known or len(known) < len(statuses):
        return Status.RANKS, ""
    return (Status.STOPPED if Status.STOPPED in known else Status.DONE), ""


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}  # Windows has no SIGKILL
        name = names.get(-exit_code, f"signal {-exit_code}")
        if name == "SIGKILL":
            return "was killed (SIGKILL: by a user, or by the system because memory ran out)."
        return f"was ended by {name}."
    return f"ended with exit code {exit_code} without an error message."


def _catch_signals() -> list[signal.Signals]:
    """Return a list to which SIGTERM is appended if this rank receives it.

    Ignore SIGINT: Ctrl-C reaches every process of a terminal, and the launcher handles it.
    """
    signals: list[signal.Signals] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(signal.Signals(number)))
    return signals


def _launcher_lives() -> bool:
    launcher = multiprocessing.parent_process()
    return launcher is None or launcher.is_alive()


def _end_without_launcher(joined: threading.Event) -> None:
    """Kill this rank when the launcher dies: after a grace period to save if it has joined, else immediately."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    if joined.is_set():
        time.sleep(_SECONDS_WITHOUT_LAUNCHER)
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
