"""A playground run on several ranks: processes on this machine that communicate with gloo."""

import contextlib
import pickle
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core.records import MicroBatchRecord, Record
from anybatch.errors import AnyBatchError, RankFailedError
from anybatch.memory.trace import MemoryTimeline
from anybatch.parallel.launchers import listen_at_loopback, rank_context
from anybatch.testing.ranks import PRELOADED
from anybatch_guide.lines import NOT_SHOWN
from anybatch_guide.native_batch import first_step
from anybatch_guide.run_metrics import RunMetrics
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.task import load
from anybatch_guide.training import RUN_ENDS, isolated, make, run_engine

RANK_TIMEOUT: Final = timedelta(minutes=15)
"""Timeout of communication between ranks; longer than the maximum pause of a run."""
END_SECONDS: Final = 1.0
PREFERRED_SECONDS: Final = 2.0


class RankError(AnyBatchError, RuntimeError):
    """A rank of a playground run ended before the end of the run."""


class RankProcesses:
    """The ranks of a run, one process each. They use gloo on loopback only, and rendezvous through a file.

    A rank waits for a reply to every message, so pausing or cancelling the run in this process also pauses or ends the
    ranks.
    """

    def __init__(self, setting: PlaygroundSetting) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="anybatch-guide-")
        rendezvous = Path(self._folder.name, "store").as_uri()
        context = rank_context(*PRELOADED, __name__, "anybatch_guide.tasks.digits")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(setting.ranks):
            parent_end, rank_end = context.Pipe()
            process = context.Process(target=_run_rank, args=(rank_end, rank, setting, rendezvous), daemon=True)
            process.start()
            rank_end.close()  # only the rank keeps its end, so that its exit closes the pipe
            self._pipes.append(parent_end)
            self._processes.append(process)

    def first_step(self) -> Tensor | None:
        """Return the change of the parameters in the first step; None if the memory limit is too low."""
        change: Tensor | None = self._receive(self._pipes[0])[1]
        return change

    def run(self, metrics: RunMetrics, model: nn.Module) -> None:
        """Pass the messages of all ranks to `metrics` until the run ends."""
        open_pipes = list(self._pipes)
        preferred: Connection | None = None
        while open_pipes:
            pipe = _next_pipe(open_pipes, preferred)
            match self._receive(pipe):
                case "observe", record:
                    metrics.observe(record)  # blocks while the run is paused
                    begins = isinstance(record, MicroBatchRecord) and record.event == "begin"
                    preferred = pipe if begins and metrics.is_stepped else preferred
                case "add_memory", timeline:
                    metrics.add_memory(timeline)
                case "add_micro_batch", fields:
                    metrics.add_micro_batch(fields)
                    preferred = None
                case "after_step", (step, state):
                    model.load_state_dict(state)
                    metrics.after_step(step)
                case _:
                    open_pipes.remove(pipe)
                    continue
            with contextlib.suppress(ConnectionError):  # if the rank has ended, the next message is its end
                _send(pipe, metrics.is_stepped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all ranks: their next message fails because the pipe is closed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    @staticmethod
    def _receive(pipe: Connection) -> tuple[str, Any]:
        """Return a message of a rank: its kind and its content."""
        try:
            kind, content = pickle.loads(pipe.recv_bytes())  # noqa: S301 (from a process that this one started)
        except (EOFError, ConnectionError):
            message = "A rank ended in the middle of its run."
            raise RankError(message) from None
        if kind == "failed":
            raise RankError(content)
        return kind, content


class _Sender:
    """The metrics object of a rank: sends everything to the parent process, and waits for each reply."""

    def __init__(self, pipe: Connection, rank: int, setting: PlaygroundSetting, model: nn.Module) -> None:
        self._pipe, self._model, self._is_first = pipe, model, rank == 0
        # Only the first rank records memory; on other ranks the measured step is -1, which never runs.
        self.measured_step = min(1, setting.steps - 1) if rank == 0 else -1
        self.is_stepped = False

    def observe(self, record: Record, /) -> None:
        """Send a record: all kinds from the first rank, only micro-batches from other ranks."""
        if isinstance(record, MicroBatchRecord) or (self._is_first and not isinstance(record, NOT_SHOWN)):
            self._send_and_wait("observe", record)

    def add_memory(self, timeline: MemoryTimeline) -> None:
        """Send the memory of a step."""
        self._send_and_wait("add_memory", timeline)

    def add_micro_batch(self, fields: Mapping[str, Any]) -> None:
        """Send the details of a micro-batch."""
        self._send_and_wait("add_micro_batch", fields)

    def after_step(self, step: int) -> None:
        """Send the parameters after the step, which are the same on all ranks."""
        if self._is_first:
            self._send_and_wait("after_step", (step, self._model.state_dict()))

    def _send_and_wait(self, kind: str, content: object) -> None:
        _send(self._pipe, (kind, content))
        self.is_stepped = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 (from a process that this one started)


def _next_pipe(pipes: Sequence[Connection], preferred: Connection | None) -> Connection:
    """Return a pipe that has a message.

    For `PREFERRED_SECONDS`, wait for the rank whose micro-batch is running: the next message of another rank may pause
    the run before that micro-batch ends. Then accept any rank, because the micro-batch may need it to communicate.
    """
    if preferred is not None and preferred in pipes and wait([preferred], PREFERRED_SECONDS):
        return preferred
    ready = wait(pipes)[0]
    assert isinstance(ready, Connection)
    return ready


def _send(pipe: Connection, content: object) -> None:
    # Pickle explicitly, because a torch pipe would move the parameters of the model into shared memory.
    pipe.send_bytes(pickle.dumps(content))


def _run_rank(pipe: Connection, rank: int, setting: PlaygroundSetting, rendezvous: str) -> None:
    """Run one rank, from its first step to the end of the run."""
    listen_at_loopback()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=setting.ranks, timeout=RANK_TIMEOUT)
    try:
        with isolated():
            task = load(setting.task, norm=setting.norm)
            change = first_step(setting, task)
            if rank == 0:
                _send(pipe, ("first_step", change))
            parts = make(setting, task)
            # The last record of a rank contains its failure.
            with suppress(*RUN_ENDS, RankFailedError):
                run_engine(setting, task, _Sender(pipe, rank, setting, parts[0]), parts)
    except (EOFError, ConnectionError):
        return  # the parent has closed the pipe
    except Exception as error:  # noqa: BLE001 (the page shows every error)
        traceback.print_exc()
        _send(pipe, ("failed", f"{type(error).__name__} on rank {rank}: {error}"))
        return
    with suppress(ConnectionError):  # a cancelled run may have closed the pipe
        _send(pipe, ("over", None))
    dist.destroy_process_group()
