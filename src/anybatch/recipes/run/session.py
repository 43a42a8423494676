"""A training session: from a job to parameters in a folder, in one go or in several.

A session steps, evaluates, saves, and stops when it is asked to. What it is for is that nothing of this shows in the
result: a run that was stopped, or killed, and resumed on as many ranks ends with the same bits.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anybatch.checkpoints import list_checkpoints
from anybatch.core.geometry import ceil_div
from anybatch.core.records import MemoryRecord, Observer, Observers, Record
from anybatch.core.reports import StepReport
from anybatch.engine.engine import Engine
from anybatch.engine.micro_batch_size.search import Memory
from anybatch.errors import CannotRedoError, RankFailedError, UserError
from anybatch.events.jsonl import JsonlLog
from anybatch.parallel.world import World
from anybatch.planner.cache.measured_devices import KnownDevices
from anybatch.recipes.job import Job
from anybatch.recipes.run.folder import NO_ORIGIN, Origin, RunFolder, RunHeader
from anybatch.recipes.run.prepare import PreparedRun, on_first_rank, prepare
from anybatch.recipes.run.settings import Choices
from anybatch.recipes.run.stop import StopRequest

CHECKPOINT_SECONDS = 600.0
NUM_EVALUATIONS = 4
"""Evaluations of a run that is shorter than an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """The facts known before the first step of a session.

    Attributes:
        folder: where the run's files are.
        first_step: number of the first step of this session.
        num_steps: steps of the whole run, those before this session included; None if the data has no length.
    """

    folder: RunFolder
    first_step: int
    num_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """How a session ended.

    Attributes:
        folder: where the run's files are.
        stopped: it was asked to stop before the end of the run.
        num_steps: steps of the whole run so far.
        num_session_steps: steps of this session.
        num_session_samples: samples of those, over all ranks.
        session_seconds: from its beginning to its end.
        stepping_seconds: the part of them that was neither start, evaluation nor saving.
        peak_bytes: most memory of this rank in a step, as in `MemoryRecord`; None where the system does not report it.
        limit_bytes: what there is; None if that is not said.
        loss: of the last step; None if there was none.
        metrics: of the last evaluation; empty if there was none.
        checkpoint: the newest one; None if there is none.
    """

    folder: RunFolder
    stopped: bool
    num_steps: int
    num_session_steps: int
    num_session_samples: int
    session_seconds: float
    stepping_seconds: float
    peak_bytes: int | None
    limit_bytes: int | None
    loss: float | None
    metrics: Mapping[str, float]
    checkpoint: Path | None


def train(
    job: Job,
    folder: str | Path,
    choices: Choices | None = None,
    *,
    resume: bool = False,
    origin: Origin = NO_ORIGIN,
    world: World | None = None,
    known: Memory | None = None,
    devices: KnownDevices | None = None,
    observer: Callable[[SessionStart], Observer] | None = None,
    stop: Callable[[], bool] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> SessionResult:
    """Train a job in a folder, or go on with it. Call it on every rank.

    Evaluates and saves at the end of every epoch and of the run, saves every `checkpoint_seconds`, and when asked to
    stop. Resumed, it goes on from the newest intact checkpoint, and at the very beginning if there is none yet.

    Where a resumed run is given another batch size, learning rate or length, its learning rates are from then on those
    that a new run with these settings would have at that step.

    Args:
        job: what to learn.
        folder: for the log and the checkpoints; must be empty, or not there, unless `resume`.
        choices: settings that differ from the job's or, when resumed, from those before; None keeps a setting.
        resume: go on with the run in `folder`.
        origin: how the run was asked for, kept in the folder for who resumes it.
        world: the ranks; None asks the environment.
        known: remembers which micro-batch sizes were the fastest, from one run to the next; None times them again.
        devices: remembers what steps were measured to take of devices; None takes them all for unknown.
        observer: function (session start) -> another observer on this rank, beside the log.
        stop: function () -> whether to stop after this step; one rank is enough. None stops on SIGINT and SIGTERM, and
            a second SIGINT ends at once.
        checkpoint_seconds: most time between two checkpoints, looked at after each step.
        clock: monotonic time in seconds.

    Raises:
        UserError: the folder is used, or a choice cannot be run.
        CheckpointError: the folder holds no run that can be resumed, or a checkpoint cannot be written.
        NonFiniteError, RankFailedError: as `Engine.step`.
        CannotRedoError: memory ran out in a step that ranks cannot repeat. The folder keeps the smaller micro-batch
            size with which `resume` then goes on.
    """
    begun = clock()
    world = World.from_environment() if world is None else world
    if world.has_model_groups:
        message = (
            f"a recipe is trained on ranks of one process, and this world has {world.size} ranks of "
            f"{world.num_processes} processes. Use an Engine in a loop of your own."
        )
        raise UserError(message)
    place = RunFolder(Path(folder))
    held = contextlib.ExitStack()
    header = on_first_rank(world, partial(_claim, place, held, resume=resume))
    ready: PreparedRun | None = None
    try:
        with (
            held,
            contextlib.nullcontext(stop) if stop is not None else StopRequest() as asked,
            JsonlLog(place.log(world.rank)) as log,
        ):
            highest = PeakMemory()
            backlog = Backlog()
            # The user's observer gets the number of steps, so it is made after the run; until then records are kept.
            observers = Observers(log, highest) if observer is None else Observers(log, highest, backlog)
            ready = prepare(
                job,
                choices or Choices(),
                header,
                origin,
                place=place,
                world=world,
                known=known,
                devices=devices,
                observer=observers,
            )
            if observer is not None:
                first_step = ready.run.engine.num_steps
                session_start = SessionStart(folder=place, first_step=first_step, num_steps=ready.num_steps)
                backlog.forward_to(observer(session_start))
            timing = _SessionTiming(asked, checkpoint_seconds, clock, begun)
            return _run(_Session(ready, place, timing, highest), ready.run.engine)
    except BaseException as error:
        if _keeps_smaller_size(error, place, world):
            raise
        # A new folder in which nothing was learned would be in the way of the same command.
        if header is None and (ready is None or ready.run.engine.num_steps == 0):
            place.clear(world.rank)  # so that the same command runs once the reason is gone
        raise


def _claim(place: RunFolder, held: contextlib.ExitStack, *, resume: bool) -> RunHeader | None:
    """Lock the folder until `held` is closed; return the header of the run to resume."""
    header = place.read() if resume else None
    if header is None:
        place.refuse_used()
    held.enter_context(place.locked())
    return header


def _keeps_smaller_size(error: BaseException, place: RunFolder, world: World) -> bool:
    """Write down the size to go on with, where a step could not be repeated in smaller micro-batches."""
    if not isinstance(error, CannotRedoError | RankFailedError) or error.smaller_micro_batch_size is None:
        return False
    if world.rank == 0:
        place.write(dataclasses.replace(place.read(), largest_micro_batch_size=error.smaller_micro_batch_size))
    return True


def _run(session: "_Session", engine: Engine) -> SessionResult:
    """Step a session to its end, and close the engine, also after an error."""
    try:
        outcome = session.run()
    except BaseException as error:
        engine.close(error)
        raise
    engine.close(StoppedOnRequest("as asked") if outcome.stopped else None)
    return outcome


class StoppedOnRequest(KeyboardInterrupt):
    """The reason in a log for the end of a run that was asked to stop. It is never raised."""


class Backlog:
    """An observer that keeps records for another one, which is made only when the run is ready."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._observer: Observer | None = None

    def observe(self, record: Record, /) -> None:
        """Keep a record, or pass it on once there is whom to pass it to."""
        if self._observer is None:
            self._records.append(record)
        else:
            self._observer.observe(record)

    def forward_to(self, observer: Observer) -> None:
        """Pass on the records that were kept, and all later ones as they come."""
        for record in self._records:
            observer.observe(record)
        self._records, self._observer = [], observer


class PeakMemory:
    """An observer that keeps the memory record of the highest peak."""

    def __init__(self) -> None:
        self.record: MemoryRecord | None = None

    def observe(self, record: Record, /) -> None:
        """Keep a record, if it is of a higher peak."""
        if isinstance(record, MemoryRecord) and (self.record is None or record.peak_bytes > self.record.peak_bytes):
            self.record = record


@dataclass(frozen=True, slots=True, eq=False)
class _SessionTiming:
    """When to stop, when to save, and what time it is."""

    asked: Callable[[], bool]
    checkpoint_seconds: float
    clock: Callable[[], float]
    begun: float


class _Session:
    """The loop of one session, and its state between two steps."""

    def __init__(self, ready: PreparedRun, place: RunFolder, timing: _SessionTiming, highest: PeakMemory) -> None:
        self._run, self._engine = ready.run, ready.run.engine
        self._rest = ready.rest
        self._num_steps = ready.num_steps
        self._place, self._timing, self._highest = place, timing, highest
        self._first_step = self._engine.num_steps
        self._evaluated = self._saved = -1
        self._saved_at = timing.clock()
        self._report: StepReport | None = None
        self._num_samples = 0
        self._aside_seconds = 0.0
        self._metrics: Mapping[str, float] = {}

    def run(self) -> SessionResult:
        """Step until the data ends or a stop is asked for."""
        begun = self._timing.clock()
        stopped = self._step_to_the_end()
        return self._outcome(stopped=stopped, loop_seconds=self._timing.clock() - begun)

    def _step_to_the_end(self) -> bool:
        """Return whether it was stopped."""
        often = self._steps_per_evaluation()
        for batch in self._rest or ():
            self._report = report = self._engine.step(batch)
            self._num_samples += report.num_samples
            stopping, due = self._agree()
            # Asked to stop in the very last step, the run is complete and ends as if it had not been asked.
            if stopping and self._engine.num_steps != self._num_steps:
                self._save()
                return True
            # A position with no samples behind it is the beginning of an epoch, so the last one has just ended.
            ends_epoch = report.position.sample_offset == 0
            if ends_epoch or (often and self._engine.num_steps % often == 0):
                self._evaluate()
            if ends_epoch or due:
                self._save()
        self._evaluate()
        if self._report is not None:
            self._save()
        return False

    def _outcome(self, *, stopped: bool, loop_seconds: float) -> SessionResult:
        """Return how it ended."""
        found = list_checkpoints(self._place.checkpoints)
        memory = self._highest.record
        return SessionResult(
            folder=self._place,
            stopped=stopped,
            num_steps=self._engine.num_steps,
            num_session_steps=self._engine.num_steps - self._first_step,
            num_session_samples=self._num_samples,
            session_seconds=self._timing.clock() - self._timing.begun,
            stepping_seconds=loop_seconds - self._aside_seconds,
            peak_bytes=None if memory is None else memory.peak_bytes,
            limit_bytes=None if memory is None else memory.limit_bytes,
            loss=None if self._report is None else self._report.loss,
            metrics=self._metrics,
            checkpoint=found[-1] if found else None,
        )

    def _agree(self) -> tuple[bool, bool]:
        """Return whether to stop, which any rank may ask for, and whether to save, which is up to rank 0's clock."""
        is_due = self._timing.clock() - self._saved_at >= self._timing.checkpoint_seconds
        # Signals reach ranks at different times and clocks differ: all ranks have to stop, and save, after the same
        # step.
        votes = self._engine.world.gather_numbers([self._timing.asked(), is_due])
        return any(asked for asked, _ in votes), bool(votes[0][1])

    def _steps_per_evaluation(self) -> int | None:
        """Return after how many steps to evaluate a run that is shorter than an epoch; None for at its epochs' ends."""
        # Under a ramp epochs are not of one length; a run of whole ones is never shorter than one.
        if self._rest is None or self._num_steps is None or self._rest.request.epochs is not None:
            return None
        try:
            epoch = self._rest.steps_per_epoch
        except TypeError:
            # Data without a length has no end of an epoch to wait for.
            epoch = self._num_steps + 1
        return max(1, ceil_div(self._num_steps, NUM_EVALUATIONS)) if self._num_steps < epoch else None

    def _evaluate(self) -> None:
        if self._evaluated != self._engine.num_steps:
            with self._aside():
                self._metrics = self._run.evaluate()
            self._evaluated = self._engine.num_steps

    def _save(self) -> None:
        # The end of an epoch and the clock may both ask for a checkpoint of the same step.
        if self._saved != self._engine.num_steps:
            with self._aside():
                self._engine.save(self._place.checkpoints)
            self._saved = self._engine.num_steps
            self._saved_at = self._timing.clock()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Count the time of evaluations and checkpoints, which are no steps."""
        begun = self._timing.clock()
        yield
        self._aside_seconds += self._timing.clock() - begun
