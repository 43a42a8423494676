"""Real ranks in a test: processes connected by gloo, which run functions and return the values to the caller."""

import gc
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from anybatch.errors import WorldError
from anybatch.parallel.launchers import listen_at_loopback, rank_context

RankContext = ForkContext | ForkServerContext | SpawnContext
PRELOADED = (__name__, "anybatch.engine.engine")
"""Modules that the fork server imports once for all ranks."""


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How a function ended on one rank.

    Attributes:
        value: its return value.
        error: its traceback if it raised, or the way the process died; None if it returned.
    """

    value: Any = None
    error: str | None = None


class PoolError(WorldError, AssertionError):
    """A rank of a pool raised, hung or died. The message has every rank's traceback."""


class RankPool:
    """`world_size` processes in one process group, which run one function after the other.

    Functions must be importable (defined at the top of a module). On Linux, ranks are forked from a server process that
    imports torch once, when the first pool starts. Later pools start faster, but have the environment variables of that
    moment. On other systems each rank imports torch. If a function may break the connection between ranks, use
    `run_ranks` instead, because the pool cannot be used afterwards.

    Args:
        world_size: number of ranks.
        timeout_seconds: maximum time that a rank waits for another rank, and the caller for all ranks.
        backend: backend of torch's process group, such as "cpu:gloo,cuda:nccl" for ranks with a GPU each.
        start_processes: whether ranks may start processes, such as loading workers.
        context: the multiprocessing context that starts ranks; None: a fork server with the engine imported, on Linux.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_seconds: float = 120.0,
        backend: str = "gloo",
        start_processes: bool = False,
        context: RankContext | None = None,
    ) -> None:
        self._timeout_seconds = timeout_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="anybatch-ranks-")
        # A file instead of a port, which another process could take first.
        rendezvous = Path(self._folder.name, "store").as_uri()
        context = rank_context(*PRELOADED) if context is None else context
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # A forked rank closes our ends of other pipes, which it inherits, or it would keep those pipes open.
            inherited = (*self._pipes, ours) if context.get_start_method() == "fork" else ()
            process = context.Process(
                target=_serve,
                args=(theirs, inherited, rank, world_size, rendezvous, timeout_seconds, backend),
                daemon=not start_processes,
            )
            process.start()
            # If we kept the rank's end, the pipe would stay open after the rank has died.
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[RankOutcome]:  # noqa: ANN401 (the function's)
        """Run `function(*args)` on every rank and return how each ended, in rank order."""
        for pipe in self._pipes:
            pipe.send((function, args))
        received: dict[int, RankOutcome] = {}
        while len(received) < len(self._pipes):
            ready = wait([p for rank, p in enumerate(self._pipes) if rank not in received], self._timeout_seconds)
            if not ready:
                break
            for rank, pipe in enumerate(self._pipes):
                if pipe in ready:
                    received[rank] = self._receive(rank)
        # Waiting has a timeout, because a rank that hangs must not hang the test session.
        late = RankOutcome(error=f"no answer after {self._timeout_seconds} seconds")
        return [received.get(rank, late) for rank in range(len(self._pipes))]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:  # noqa: ANN401 (the function's)
        """Run `function(*args)` on every rank and return its values, in rank order.

        Raises:
            PoolError: a rank did not return; the message has every rank's error.
        """
        outcomes = self.outcomes(function, *args)
        failed = [f"rank {rank}:\n{outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
        if failed:
            raise PoolError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            # A rank ends when its pipe is closed, unless it hangs; then it is killed.
            process.join(self._timeout_seconds / 10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    def _receive(self, rank: int) -> RankOutcome:
        try:
            outcome: RankOutcome = self._pipes[rank].recv()
        except (EOFError, ConnectionError):
            # The exit code is known only after `join`.
            self._processes[rank].join(self._timeout_seconds)
            return RankOutcome(error=f"the process ended with exit code {self._processes[rank].exitcode}")
        return outcome


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,  # noqa: ANN401 (the function's)
    timeout_seconds: float = 120.0,
) -> list[RankOutcome]:
    """Run `function(*args)` once on new ranks and return how each ended, in rank order.

    Args:
        world_size: number of ranks.
        function: a function at the top of a module, so that ranks can import it.
        *args: arguments of the function; they are pickled.
        timeout_seconds: maximum time that a rank waits for another rank, and the caller for all ranks.
    """
    with RankPool(world_size, timeout_seconds=timeout_seconds) as pool:
        return pool.outcomes(function, *args)


def _serve(  # noqa: PLR0917 (the arguments of a process)
    pipe: Connection,
    inherited: Sequence[Connection],
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_seconds: float,
    backend: str,
) -> None:
    for end in inherited:
        end.close()
    # Objects imported before the fork live as long as the rank, so garbage collections can skip them.
    gc.freeze()
    # Ranks share the cores of one machine, so several threads per rank would compete for them.
    torch.set_num_threads(1)
    listen_at_loopback()
    if "nccl" in backend:  # NCCL uses the current device of the process
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, ConnectionError):
            break
        try:
            outcome = RankOutcome(value=function(*args))
            pipe.send(outcome)  # if the value cannot be pickled, this raises before it sends anything
        except (Exception, SystemExit):  # noqa: BLE001 (the caller gets it as text)
            outcome = RankOutcome(error=traceback.format_exc())
            pipe.send(outcome)
        if outcome.error:
            break  # the other ranks may wait in a collective that this rank does not join
    dist.destroy_process_group()
