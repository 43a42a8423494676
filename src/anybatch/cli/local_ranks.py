"""Start several ranks on this machine, wait for them, and print an error only once.

The ranks rendezvous in a file that only this user can read and write, and listen on loopback only.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from anybatch.cli.launch import join, print_stopping, run_rank
from anybatch.cli.status import Status, explain
from anybatch.cli.train import PRELOADED, TrainRequest
from anybatch.parallel.launchers import listen_at_loopback, set_launch_variables, start_fork_server
from anybatch.recipes.session import SIGNALS

_UNKNOWN = -1
_MOST_BYTES = 2000
_SECONDS_AFTER_FAILURE = 10.0
"""Time for the other ranks to exit after one fails; then the launcher kills them."""
_SECONDS_WITHOUT_LAUNCHER = 30.0
"""Time for a rank to save and exit after the launcher dies; then it kills itself."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory that the launcher shares with its ranks.

    Attributes:
        stop: nonzero after a request to stop.
        statuses: exit status of each rank; `_UNKNOWN` if it reported none.
        last_words: error of a rank that failed because of another one; printed if that one left no message.
        num_threads: torch threads of each rank.
    """

    stop: Any
    statuses: Any
    last_words: Any
    num_threads: int


def run_local_ranks(request: TrainRequest, num_ranks: int) -> Status:
    """Start ranks on this machine, wait for them, and return the exit status."""
    context = start_fork_server(*PRELOADED)
    board = SharedState(
        stop=context.RawValue("b", 0),
        statuses=context.RawArray("i", [_UNKNOWN] * num_ranks),
        last_words=context.RawArray("c", _MOST_BYTES),
        num_threads=threads_per_rank(num_ranks),
    )
    # multiprocessing's temporary folder is private to this user and removed after all processes have ended.
    store = Path(get_temp_dir(), f"store-{uuid.uuid4().hex}")
    store.touch()
    ranks = [context.Process(target=serve, args=(request, board, rank, num_ranks, store)) for rank in range(num_ranks)]
    with _listening(board):
        try:
            exit_codes = _run(ranks)
        except KeyboardInterrupt as error:
            sys.stderr.write(f"{explain(error)}\n")
            return Status.INTERRUPTED
    status, words = exit_status_of(list(board.statuses), exit_codes)
    if status is Status.RANKS:
        sys.stderr.write(f"anybatch: {words or board.last_words.value.decode(errors='replace')}\n")
    return status


def _run(ranks: Sequence[BaseProcess]) -> dict[int, int]:
    """Run processes to their end; if one fails, kill the others after a grace period.

    Returns:
        The nonzero exit codes of ranks that were not killed here, by rank, in the order in which they ended.
    """
    failed: dict[int, int] = {}
    running = dict(enumerate(ranks))
    deadline: float | None = None
    try:
        for process in ranks:
            process.start()
        while running and (deadline is None or time.monotonic() < deadline):
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            wait([process.sentinel for process in running.values()], patience)
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


def serve(request: TrainRequest, board: SharedState, rank: int, num_ranks: int, store: Path) -> None:
    """Run one rank in a process started by the launcher."""
    joined = threading.Event()
    threading.Thread(target=_end_without_launcher, args=(joined,), name="anybatch launcher", daemon=True).start()
    torch.set_num_threads(board.num_threads)
    set_launch_variables(rank, num_ranks, _opened(store).as_uri())
    listen_at_loopback()
    asked = _catch_signals()
    try:
        world = join()
    except Exception as error:  # noqa: BLE001 (the launcher prints it)
        status, words = Status.RANKS, explain(error)
    else:
        joined.set()
        status, words = run_rank(
            request, world, lambda: bool(board.stop.value or asked or not _launcher_lives()), is_watched=True
        )
    if status is Status.RANKS:
        board.last_words.value = words.encode()[: _MOST_BYTES - 1]
    if status in (Status.DONE, Status.STOPPED):
        dist.destroy_process_group()
    board.statuses[rank] = status
    if status not in (Status.DONE, Status.STOPPED):
        sys.exit(status)


def _opened(store: Path) -> Path:
    """Return a path to the store that stays valid after the file is removed (Linux only).

    torch waits for a missing file without releasing the GIL.
    """
    place = Path(f"/proc/self/fd/{os.open(store, os.O_RDWR)}")
    return place if place.exists() else store


def threads_per_rank(num_ranks: int) -> int:
    """Return the number of threads per rank that uses every core once."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torch's number is smaller if the user has set OMP_NUM_THREADS.
    return min(torch.get_num_threads(), max(1, num_cores // num_ranks))


def exit_status_of(statuses: Sequence[int], exit_codes: Mapping[int, int]) -> tuple[Status, str]:
    """Return the exit status of a run, and a message about a rank that died without one.

    Args:
        statuses: status of each rank; below 0 if it reported none.
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
    """Return a list that receives SIGTERM if this rank gets one.

    Ignore SIGINT: Ctrl-C reaches every process of a terminal, and the launcher handles it.
    """
    asked: list[signal.Signals] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(signal.Signals(number)))
    return asked


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


@contextmanager
def _listening(board: SharedState) -> Iterator[None]:
    """Forward signals as a request to stop; a second Ctrl-C ends the ranks immediately."""

    def ask(number: int, _frame: FrameType | None) -> None:
        if not board.stop.value:
            board.stop.value = 1
            print_stopping(signal.Signals(number))
        elif number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third one must not interrupt the clean-up
            raise KeyboardInterrupt

    former = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
