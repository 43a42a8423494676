"""Several ranks on this machine, started by torch's own elastic launcher; the error that ends them is printed once."""

import logging
import multiprocessing
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from anybatch.cli.failure import explain
from anybatch.cli.fork_server import START_METHOD, start_fork_server
from anybatch.cli.rank import join, run_rank
from anybatch.cli.status import Status, status_of
from anybatch.cli.stopping import say_stopping
from anybatch.cli.train_request import TrainRequest
from anybatch.recipes.run.stop import SIGNALS

_UNKNOWN = -1
_MOST_BYTES = 2000
_SECONDS_BEHIND = 1.0
"""How long a rank that ends because of another one lets it go ahead, so that the launcher sees who was first."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """Memory that the launcher shares with its ranks.

    Attributes:
        stop: not 0 once the launcher was asked to stop.
        statuses: how each rank ended, as far as it could say.
        last_words: what a rank knows that ended because of another one; shown if that other one left none.
        num_threads: of each rank, for torch's operators.
    """

    stop: Any
    statuses: Any
    last_words: Any
    num_threads: int


def run_local_ranks(request: TrainRequest, num_ranks: int) -> Status:
    """Start ranks here, wait for them, and return the exit status."""
    start_fork_server()
    context = multiprocessing.get_context(START_METHOD)
    board = SharedState(
        stop=context.RawValue("b", 0),
        statuses=context.RawArray("i", [_UNKNOWN] * num_ranks),
        last_words=context.RawArray("c", _MOST_BYTES),
        num_threads=threads_per_rank(num_ranks),
    )
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # port 0: whichever is free
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method=START_METHOD,
        signals_to_handle="SIGQUIT",  # the others are ours, see below
    )
    # torch's launcher reports processes; the shared state has what the ranks themselves could say.
    failures: Mapping[int, ProcessFailure] = {}
    with _listening(board), _without_logs():
        try:
            elastic_launch(config, serve)(request, board)
        except ChildFailedError as error:
            failures = error.failures
        except KeyboardInterrupt as error:
            sys.stderr.write(f"{explain(error)}\n")
            return Status.INTERRUPTED
    status, words = exit_status_of(list(board.statuses), {rank: failure.exitcode for rank, failure in failures.items()})
    if status is Status.RANKS:
        sys.stderr.write(f"anybatch: {words or board.last_words.value.decode(errors='replace')}\n")
    return status


def serve(request: TrainRequest, board: SharedState) -> None:
    """Run one rank, in a process that the launcher has started."""
    torch.set_num_threads(board.num_threads)
    asked = _catch_signals()
    try:
        world = join()
    except Exception as error:  # noqa: BLE001 (the exit status says it)
        sys.exit(status_of(error))
    status, words = run_rank(
        request, world, lambda: bool(board.stop.value or asked or not _launcher_lives()), is_watched=True
    )
    board.statuses[world.rank] = status
    if status in (Status.DONE, Status.STOPPED) and _launcher_lives():
        dist.destroy_process_group()
        return
    if status is Status.RANKS:
        board.last_words.value = words.encode()[: _MOST_BYTES - 1]
        # The launcher takes the first process that ends for the culprit.
        time.sleep(_SECONDS_BEHIND)
    sys.exit(status)  # which makes the launcher end the other ranks


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


@contextmanager
def _listening(board: SharedState) -> Iterator[None]:
    """Let signals to the launcher ask the ranks to stop; a second Ctrl-C ends them at once."""

    def ask(number: int, _frame: FrameType | None) -> None:
        if not board.stop.value:
            board.stop.value = 1
            say_stopping(signal.Signals(number))
        elif number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third one must not come between
            for child in multiprocessing.active_children():
                child.kill()
            raise KeyboardInterrupt

    former = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence the elastic launcher, which logs the traceback of each rank: the rank has printed what matters."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
