"""Trains a job in a folder until the run ends or a signal stops it; a second Ctrl-C quits immediately."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

from anybatch.checkpoints import list_checkpoints
from anybatch.core.geometry import ceil_div
from anybatch.core.records import MemoryRecord, Observer, Observers, Record, StepReport
from anybatch.core.run_config import RunConfig
from anybatch.engine.engine import Engine
from anybatch.errors import CannotRedoError, RankFailedError
from anybatch.events.jsonl import JsonlLog
from anybatch.parallel.world import World
from anybatch.recipes.job import Job
from anybatch.recipes.prepare import PreparedRun, on_first_rank, prepare
from anybatch.recipes.run_folder import NO_ORIGIN, Origin, RunFolder, RunHeader

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Catches stop signals inside its `with` block; call it to learn whether a stop was requested.

    SIGINT (Ctrl-C) and SIGTERM request a stop. A SIGINT after either raises KeyboardInterrupt immediately; a second
    SIGTERM does not, because schedulers may send it twice. `notify` is called once, from the signal handler, so it must
    not print through a buffer.
    """

    def __init__(self, notify: Callable[[signal.Signals], None] | None = None) -> None:
        self._notify = notify
        self._received: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only this thread may catch signals
            self._former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._former = {}

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third SIGINT must not interrupt the clean-up
                raise KeyboardInterrupt
            return
        self._received = signal.Signals(number)
        if self._notify is not None:
            self._notify(self._received)


CHECKPOINT_SECONDS = 600.0
NUM_EVALUATIONS = 4
"""Number of evaluations in a run shorter than an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """The result of a session."""

    folder: RunFolder
    stopped: bool  # whether the run was stopped on request
    num_steps: int  # since the start of the run
    num_session_steps: int
    num_session_samples: int
    session_seconds: float  # duration of the session
    stepping_seconds: float  # the part without start-up, evaluation and saving
    peak_bytes: int | None  # peak memory of this rank; None if unknown
    limit_bytes: int | None  # memory of this rank's device; None if unknown
    loss: float | None  # of the last step
    metrics: Mapping[str, float]  # of the last evaluation
    checkpoint: Path | None  # the last checkpoint

    @property
    def log(self) -> Path:
        """The log of rank 0."""
        return self.folder.log(0)


def train(
    job: Job,
    folder: str | Path,
    given: RunConfig | None = None,
    *,
    resume: bool = False,
    origin: Origin = NO_ORIGIN,
    world: World | None = None,
    observer: Callable[[RunFolder, int | None], Observer] | None = None,
    stop: Callable[[], bool] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> SessionResult:
    """Train a job in a folder, or resume the run in it. Call this on every rank.

    Evaluates and saves at the end of every epoch and of the run, and saves every `checkpoint_seconds` and on a stop
    request. A resumed run continues from the newest intact checkpoint, or starts again if there is none.

    If a resumed run has another batch size, learning rate or length, it uses the learning rates that a new run with
    these settings would have at that step.

    `given` overrides the job's settings or, when resuming, the earlier ones. `origin`, the command's recipe and
    ranks, is stored for later resumes. `observer(folder, num_steps)` returns another observer, in addition to the log;
    num_steps is None if unknown. `stop()` returns whether to stop after the current step, and may do so on one rank
    only; None: stop on SIGINT and SIGTERM, and quit immediately on a second SIGINT. `clock` is monotonic, in seconds.

    Raises:
        UserError: the folder is in use, or a setting is invalid.
        CheckpointError: the folder has no run to resume, or a checkpoint cannot be written.
        NonFiniteError, RankFailedError: as in `Engine.step`.
        CannotRedoError: memory ran out in a step that ranks cannot repeat. The smaller micro-batch size is stored in
            the folder for `resume`.
    """
    begun = clock()
    world = World.from_environment() if world is None else world
    run_folder = RunFolder(Path(folder))
    stack = contextlib.ExitStack()
    header = on_first_rank(world, partial(_claim, run_folder, stack, resume=resume))
    ready: PreparedRun | None = None
    try:
        with (
            stack,
            contextlib.nullcontext(stop) if stop is not None else StopRequest() as stop_requested,
            JsonlLog(run_folder.log(world.rank)) as log,
        ):
            highest = PeakMemory()
            backlog = Backlog()
            # The user's observer is created after `prepare`, which computes the number of steps; until then, the
            # backlog stores records.
            observers = Observers(log, highest) if observer is None else Observers(log, highest, backlog)
            ready = prepare(
                job,
                given or RunConfig(),
                header,
                origin,
                folder=run_folder,
                world=world,
                observer=observers,
            )
            if observer is not None:
                backlog.forward_to(observer(run_folder, ready.num_steps))
            session = _Session(ready, run_folder, highest, stop_requested, checkpoint_seconds, clock)
            return _run(session, ready.run.engine, begun)
    except BaseException as error:
        if _store_smaller_size(error, run_folder, world):
            raise
        if header is None and (ready is None or ready.run.engine.num_steps == 0):
            run_folder.clear(world.rank)  # so that the same command works after the cause is fixed
        raise


def _claim(folder: RunFolder, stack: contextlib.ExitStack, *, resume: bool) -> RunHeader | None:
    """Lock the folder until `stack` closes; return the header of the run to resume."""
    header = folder.read() if resume else None
    if header is None:
        folder.check_unused()
    stack.enter_context(folder.locked())
    return header


def _store_smaller_size(error: BaseException, folder: RunFolder, world: World) -> bool:
    """Store the smaller micro-batch size that an error proposes for a resume; return False if it proposes none."""
    if not isinstance(error, CannotRedoError | RankFailedError) or error.smaller_micro_batch_size is None:
        return False
    if world.rank == 0:
        folder.write(dataclasses.replace(folder.read(), largest_micro_batch_size=error.smaller_micro_batch_size))
    return True


def _run(session: "_Session", engine: Engine, begun: float) -> SessionResult:
    """Run a session to its end, and close the engine, also after an error."""
    try:
        outcome = session.run(begun)
    except BaseException as error:
        engine.close(error)
        raise
    engine.close(StoppedOnRequest("as asked") if outcome.stopped else None)
    return outcome


class StoppedOnRequest(KeyboardInterrupt):
    """The reason in the log for the end of a run that was stopped on request. Never raised."""


class Backlog:
    """An observer that stores records for another observer, which is created later."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._observer: Observer | None = None

    def observe(self, record: Record, /) -> None:
        """Store a record, or forward it if the observer exists."""
        if self._observer is None:
            self._records.append(record)
        else:
            self._observer.observe(record)

    def forward_to(self, observer: Observer) -> None:
        """Forward the stored records and all later ones."""
        for record in self._records:
            observer.observe(record)
        self._records, self._observer = [], observer


class PeakMemory:
    """An observer that keeps the memory record with the highest peak."""

    def __init__(self) -> None:
        self.record: MemoryRecord | None = None

    def observe(self, record: Record, /) -> None:
        """Keep a record if its peak is the highest."""
        if isinstance(record, MemoryRecord) and (self.record is None or record.peak_bytes > self.record.peak_bytes):
            self.record = record


class _Session:
    """The loop of one session, and its state between steps."""

    def __init__(  # noqa: PLR0917 (what a session needs)
        self,
        ready: PreparedRun,
        folder: RunFolder,
        highest: PeakMemory,
        stop_requested: Callable[[], bool],
        checkpoint_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._run, self._engine = ready.run, ready.run.engine
        self._rest = ready.rest
        self._num_steps = ready.num_steps
        self._folder, self._highest = folder, highest
        self._stop_requested, self._checkpoint_seconds, self._clock = stop_requested, checkpoint_seconds, clock
        self._first_step = self._engine.num_steps
        self._evaluated = self._saved = -1
        self._saved_at = clock()
        self._report: StepReport | None = None
        self._num_samples = 0
        self._stepping_seconds = 0.0
        self._metrics: Mapping[str, float] = {}

    def run(self, begun: float) -> SessionResult:
        """Step until the data ends or a stop is requested; the session began at `begun`."""
        stopped = self._step_to_the_end()
        found = list_checkpoints(self._folder.checkpoints)
        memory = self._highest.record
        return SessionResult(
            folder=self._folder,
            stopped=stopped,
            num_steps=self._engine.num_steps,
            num_session_steps=self._engine.num_steps - self._first_step,
            num_session_samples=self._num_samples,
            session_seconds=self._clock() - begun,
            stepping_seconds=self._stepping_seconds,
            peak_bytes=None if memory is None else memory.peak_bytes,
            limit_bytes=None if memory is None else memory.limit_bytes,
            loss=None if self._report is None else self._report.loss,
            metrics=self._metrics,
            checkpoint=found[-1] if found else None,
        )

    def _step_to_the_end(self) -> bool:
        """Run all steps, evaluations and saves; return whether the session stopped on request."""
        interval, begun = self._steps_per_evaluation(), self._clock()
        for batch in self._rest or ():
            self._report = report = self._engine.step(batch)
            self._num_samples += report.num_samples
            stopping, due = self._agree()
            self._stepping_seconds += self._clock() - begun
            # A request in the very last step has no effect, because the run is complete.
            if stopping and self._engine.num_steps != self._num_steps:
                self._save()
                return True
            # A position without samples is the start of an epoch: the last epoch just ended.
            ends_epoch = report.position.sample_offset == 0
            if ends_epoch or (interval and self._engine.num_steps % interval == 0):
                self._evaluate()
            if ends_epoch or due:
                self._save()
            begun = self._clock()
        self._evaluate()
        if self._report is not None:
            self._save()
        return False

    def _agree(self) -> tuple[bool, bool]:
        """Return whether to stop, which any rank may request, and whether to save, which rank 0's clock decides."""
        is_due = self._clock() - self._saved_at >= self._checkpoint_seconds
        # Signals arrive at different times and clocks differ, but all ranks must stop and save after the same step.
        votes = self._engine.world.gather_numbers([self._stop_requested(), is_due])
        return any(stop for stop, _ in votes), bool(votes[0][1])

    def _steps_per_evaluation(self) -> int | None:
        """Return the steps between evaluations of a run shorter than an epoch; None: evaluate at the end of epochs."""
        # A run of whole epochs is never shorter than one; with a growing batch size, epochs differ in their steps.
        if self._rest is None or self._num_steps is None or self._rest.options.epochs is not None:
            return None
        try:
            epoch = self._rest.steps_per_epoch
        except TypeError:
            # Data without a length has no known end of an epoch.
            epoch = self._num_steps + 1
        return max(1, ceil_div(self._num_steps, NUM_EVALUATIONS)) if self._num_steps < epoch else None

    def _evaluate(self) -> None:
        if self._evaluated != self._engine.num_steps:
            self._metrics = self._run.evaluate()
            self._evaluated = self._engine.num_steps

    def _save(self) -> None:
        # The end of an epoch and the clock may both request a checkpoint of the same step.
        if self._saved != self._engine.num_steps:
            self._engine.save(self._folder.checkpoints)
            self._saved = self._engine.num_steps
            self._saved_at = self._clock()
