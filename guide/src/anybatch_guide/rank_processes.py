"""A playground run on several ranks: processes of this machine with gloo between them, followed from here."""

import multiprocessing
import pickle
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch.distributed as dist
from torch import Tensor, nn

from anybatch.core.records import MicroBatchRecord, Record
from anybatch.errors import AnyBatchError, RankFailedError
from anybatch.memory.timeline import MemoryTimeline
from anybatch.parallel.launchers import listen_at_loopback
from anybatch.testing.ranks import PRELOADED
from anybatch_guide.lines import NOT_SHOWN
from anybatch_guide.native_batch import first_step
from anybatch_guide.run_metrics import RunMetrics
from anybatch_guide.setting import PlaygroundSetting
from anybatch_guide.tasks.task import load
from anybatch_guide.training import RUN_ENDS, isolated, make, run_engine

PATIENCE: Final = timedelta(minutes=15)
"""How long ranks wait for each other: longer than a run may be paused."""
END_SECONDS: Final = 1.0
LOOK_SECONDS: Final = 2.0


class RankError(AnyBatchError, RuntimeError):
    """A rank of a playground run has ended before its run was over."""


class RankProcesses:
    """The ranks of a run, one process each. They speak over gloo at loopback only; a file says where each is.

    Whatever a rank tells waits for an answer, so that a run that is paused here stands still there, and one that is
    given up here ends there.

    Args:
        setting: what the run does.
    """

    def __init__(self, setting: PlaygroundSetting) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="anybatch-guide-")
        rendezvous = Path(self._folder.name, "store").as_uri()
        context = _context()
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_be_rank, args=(theirs, rank, setting, rendezvous), daemon=True)
            process.start()
            theirs.close()  # only the rank keeps its end, so that its death is seen here
            self._pipes.append(ours)
            self._processes.append(process)

    def first_step(self) -> Tensor | None:
        """Return by how much the first step moves the parameters; None where memory is too little for it."""
        moved: Tensor | None = self._receive(self._pipes[0])[1]
        return moved

    def run(self, metrics: RunMetrics, model: nn.Module) -> None:
        """Follow the run to its end.

        Args:
            metrics: takes what is told: every record, and memory and steps of the first rank.
            model: gets the parameters of the first rank after each step.

        Raises:
            RankError: a rank has failed in another way than a run may fail.
        """
        open_pipes = list(self._pipes)
        looked_at: Connection | None = None
        while open_pipes:
            pipe = _next_of(open_pipes, looked_at)
            match self._receive(pipe):
                case "observe", record:
                    metrics.observe(record)  # waits where the run is paused
                    begins = isinstance(record, MicroBatchRecord) and record.event == "begin"
                    looked_at = pipe if begins and metrics.is_stepped else looked_at
                case "add_memory", timeline:
                    metrics.add_memory(timeline)
                case "add_micro_batch", fields:
                    metrics.add_micro_batch(fields)
                    looked_at = None
                case "after_step", (step, state):
                    model.load_state_dict(state)
                    metrics.after_step(step)
                case _:
                    open_pipes.remove(pipe)
                    continue
            _send(pipe, metrics.is_stepped)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all ranks: one that tells something finds that nobody listens."""
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
        """Return what a rank tells: a word, and what belongs to it."""
        try:
            word, told = pickle.loads(pipe.recv_bytes())  # noqa: S301 (of our own process)
        except (EOFError, ConnectionError):
            message = "A rank has ended in the middle of its run."
            raise RankError(message) from None
        if word == "failed":
            raise RankError(told)
        return word, told


class _Sender:
    """The metrics of a rank: sends all of it to the process that follows the run, and waits for its answer."""

    def __init__(self, pipe: Connection, rank: int, setting: PlaygroundSetting, model: nn.Module) -> None:
        self._pipe, self._model, self._is_first = pipe, model, rank == 0
        # Memory is recorded on the first rank; the others never come to this step.
        self.measured_step = min(1, setting.steps - 1) if rank == 0 else -1
        self.is_stepped = False

    def observe(self, record: Record, /) -> None:
        """Send a record: every one that the page shows from the first rank, micro-batches alone from the others."""
        if isinstance(record, MicroBatchRecord) or (self._is_first and not isinstance(record, NOT_SHOWN)):
            self._tell("observe", record)

    def add_memory(self, timeline: MemoryTimeline) -> None:
        """Send the memory of a step."""
        self._tell("add_memory", timeline)

    def add_micro_batch(self, fields: Mapping[str, Any]) -> None:
        """Send what was seen of a micro-batch."""
        self._tell("add_micro_batch", fields)

    def after_step(self, step: int) -> None:
        """Send what the step has left of the model, which is the same on all ranks."""
        if self._is_first:
            self._tell("after_step", (step, self._model.state_dict()))

    def _tell(self, word: str, told: object) -> None:
        _send(self._pipe, (word, told))
        self.is_stepped = pickle.loads(self._pipe.recv_bytes())  # noqa: S301 (of our own process)


def _next_of(pipes: Sequence[Connection], looked_at: Connection | None) -> Connection:
    """Return a pipe that a rank has told something by.

    First that of the micro-batch that is looked at: another rank's, which may wait for leave to begin, would hide how
    it ends. Where ranks meet in the middle of a micro-batch, though, its end needs the other one.
    """
    if looked_at is not None and looked_at in pipes and wait([looked_at], LOOK_SECONDS):
        return looked_at
    ready = wait(pipes)[0]
    assert isinstance(ready, Connection)
    return ready


def _send(pipe: Connection, told: object) -> None:
    # Pickled here: a pipe of torch's would move the parameters of the model into shared memory.
    pipe.send_bytes(pickle.dumps(told))


def _be_rank(pipe: Connection, rank: int, setting: PlaygroundSetting, rendezvous: str) -> None:
    """Be a rank, from its first step to the end of its run."""
    listen_at_loopback()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=setting.ranks, timeout=PATIENCE)
    try:
        with isolated():
            task = load(setting.task, norm=setting.norm)
            moved = first_step(setting, task)
            if rank == 0:
                _send(pipe, ("first_step", moved))
            parts = make(setting, task)
            # What ends a run as failed stands in its last record; another rank's failure in that one's.
            with suppress(*RUN_ENDS, RankFailedError):
                run_engine(setting, task, _Sender(pipe, rank, setting, parts[0]), parts)
    except (EOFError, ConnectionError):
        return  # nobody listens any more
    except Exception as error:  # noqa: BLE001 (whatever it is, the page shows it)
        traceback.print_exc()
        _send(pipe, ("failed", f"{type(error).__name__} on rank {rank}: {error}"))
        return
    with suppress(ConnectionError):  # a run that was cancelled may be gone by now
        _send(pipe, ("over", None))
    dist.destroy_process_group()


def _context() -> ForkServerContext | SpawnContext:
    """Return how ranks are started: on Linux, from a process that has imported everything they need."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, __name__, "anybatch_guide.tasks.digits"])
    return context
