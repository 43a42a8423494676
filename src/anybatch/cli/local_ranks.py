"""Several ranks on this machine: starts them, waits for them, and prints the error that ends them once.

The ranks meet in a file that only this user can read and write. Nothing listens for them beyond loopback.
"""

import multiprocessing
import os
import shutil
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

from anybatch.cli.failure import explain
from anybatch.cli.fork_server import start_fork_server
from anybatch.cli.rank import join, run_rank
from anybatch.cli.status import Status
from anybatch.cli.stopping import say_stopping
from anybatch.cli.train_request import TrainRequest
from anybatch.parallel.launchers import listen_at_loopback, say_launched
from anybatch.recipes.run.stop import SIGNALS

_UNKNOWN = -1
_MOST_BYTES = 2000
_SECONDS_AFTER_FAILURE = 10.0
"""How long the other ranks may take to end by themselves after one has failed; then the launcher kills them."""
_SECONDS_WITHOUT_LAUNCHER = 30.0
"""How long a rank may take to save and end after the launcher has died; then it kills itself."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory that the launcher shares with its ranks.

    Attributes:
        stop: not 0 once the launcher was asked to stop.
        statuses: how each rank ended, as far as it could say.
        last_words: the message of a rank that ended because of another one; shown if that one left no message.
        num_threads: of each rank, for torch's operators.
    """

    stop: Any
    statuses: Any
    last_words: Any
    num_threads: int


def run_local_ranks(request: TrainRequest, num_ranks: int) -> Status:
    """Start ranks here, wait for them, and return the exit status."""
    context = start_fork_server()
    board = SharedState(
        stop=context.RawValue("b", 0),
        statuses=context.RawArray("i", [_UNKNOWN] * num_ranks),
        last_words=context.RawArray("c", _MOST_BYTES),
        num_threads=threads_per_rank(num_ranks),
    )
    # In multiprocessing's own folder: no other user has access to it, and it is removed when this process ends.
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
    """Run processes to their end, and kill the others some time after one has failed.

    Returns:
        The exit codes of those that failed by themselves, by rank, in the order in which they ended.
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
    """Run one rank, in a process that the launcher has started."""
    joined = threading.Event()
    threading.Thread(target=_end_without_launcher, args=(store, joined), name="anybatch launcher", daemon=True).start()
    torch.set_num_threads(board.num_threads)
    say_launched(rank, num_ranks, _opened(store).as_uri())
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
    if not _launcher_lives() and all(ended >= 0 for ended in board.statuses):
        _remove_folder(store)
    if status not in (Status.DONE, Status.STOPPED):
        sys.exit(status)


def _opened(store: Path) -> Path:
    """Return a path to the store that stays valid when the file is removed.

    torch waits for a file that is missing, and lets no other thread run meanwhile. Only Linux has such a path.
    """
    place = Path(f"/proc/self/fd/{os.open(store, os.O_RDWR)}")
    return place if place.exists() else store


def threads_per_rank(num_ranks: int) -> int:
    """Return how many threads each rank may use, so that all of them together use the cores once."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Less where the user has said so, with OMP_NUM_THREADS.
    return min(torch.get_num_threads(), max(1, num_cores // num_ranks))


def exit_status_of(statuses: Sequence[int], exit_codes: Mapping[int, int]) -> tuple[Status, str]:
    """Return the exit status of a run from those of its ranks, and what to say of a rank that could not say it itself.

    Args:
        statuses: of each rank; below 0 where it did not get to say.
        exit_codes: of the processes of ranks that failed first; below 0 for a signal.
    """
    known = [Status(status) for status in statuses if status >= 0]
    first = [Status(statuses[rank]) for rank in exit_codes if statuses[rank] >= 0]
    for status in (*first, *known):
        if status not in (Status.DONE, Status.STOPPED, Status.RANKS):
            return status, ""
    for rank, code in exit_codes.items():
        if statuses[rank] < 0:
            return Status.RANKS, f"rank {rank} {_how_it_ended(code)} The other ranks were ended too."
    if Status.RANKS in known or len(known) < len(statuses):
        return Status.RANKS, ""
    return (Status.STOPPED if Status.STOPPED in known else Status.DONE), ""


def _how_it_ended(exit_code: int) -> str:
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}  # SIGKILL is none of Windows' signals
        name = names.get(-exit_code, f"signal {-exit_code}")
        if name == "SIGKILL":
            return "was killed (SIGKILL: by a user, or by the system because memory ran out)."
        return f"was ended by {name}."
    return f"ended with exit code {exit_code} before it could say why."


def _catch_signals() -> list[signal.Signals]:
    """Return a list that is not empty once this rank itself was asked to stop.

    A Ctrl-C reaches every process of a terminal, and only the launcher acts on it.
    """
    asked: list[signal.Signals] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(signal.Signals(number)))
    return asked


def _launcher_lives() -> bool:
    launcher = multiprocessing.parent_process()
    return launcher is None or launcher.is_alive()


def _end_without_launcher(store: Path, joined: threading.Event) -> None:
    """Wait for the launcher to die; end this rank at once if it has not joined the others, else some time later."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    if joined.is_set():
        time.sleep(_SECONDS_WITHOUT_LAUNCHER)
    _remove_folder(store)
    os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)


def _remove_folder(store: Path) -> None:
    """Remove the folder that the launcher would have removed at its end."""
    shutil.rmtree(store.parent, ignore_errors=True)


@contextmanager
def _listening(board: SharedState) -> Iterator[None]:
    """Let signals to the launcher ask the ranks to stop; a second Ctrl-C ends them at once."""

    def ask(number: int, _frame: FrameType | None) -> None:
        if not board.stop.value:
            board.stop.value = 1
            say_stopping(signal.Signals(number))
        elif number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third one must not come between
            raise KeyboardInterrupt

    former = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
