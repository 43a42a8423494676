"""Stop requests: a signal stops a run after its step, a second Ctrl-C quits immediately."""

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from anybatch.checkpoints import list_checkpoints
from anybatch.core.geometry import ceil_div
from anybatch.core.records import MemoryRecord, Observer, Observers, Record, StepReport
from anybatch.core.run_config import RunConfig
from anybatch.engine.engine import Engine
from anybatch.engine.micro_batch_size.search import Memory
from anybatch.errors import CannotRedoError, RankFailedError, UserError
from anybatch.events.jsonl import JsonlLog
from anybatch.parallel.world import World
from anybatch.planner.measurements import KnownDevices
from anybatch.recipes.job import Job
from anybatch.recipes.prepare import PreparedRun, on_first_rank, prepare
from anybatch.recipes.run_folder import NO_ORIGIN, Origin, RunFolder, RunHeader

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether a stop was requested: call it to ask. Signals are caught inside its `with`.

    SIGINT (Ctrl-C) and SIGTERM request a stop. A SIGINT after either raises KeyboardInterrupt immediately; a second
    SIGTERM does not, because schedulers may send it twice. `say` is called once, from the signal handler, so it must
    not print through a buffer.
    """

    def __init__(self, say: Callable[[signal.Signals], None] | None = None) -> None:
        self._say = say
        self._asked: signal.Signals | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self._asked is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only this thread may catch signals
            self._former = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._former = {}

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._asked = signal.Signals(number)
        if self._say is not None:
            self._say(self._asked)


CHECKPOINT_SECONDS = 600.0
NUM_EVALUATIONS = 4
"""Evaluations in a run shorter than an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """The facts known before the first step of a session; `num_steps` counts the whole run, None if unknown."""

    folder: RunFolder
    first_step: int
    num_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResult:
    """The result of a session.

    `session_seconds` is its duration, `stepping_seconds` the part without start-up, evaluation and saving. `peak_bytes`
    and `limit_bytes` are of this rank; None if unknown. `loss` is of the last step, `metrics` of the last evaluation.
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
    given: RunConfig | None = None,
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
    """Train a job in a folder, or resume it. Call it on every rank.

    Evaluates and saves at the end of every epoch and of the run, and saves every `checkpoint_seconds` and on a stop
    request. A resumed run continues from the newest intact checkpoint, or starts again without one.

    If a resumed run has another batch size, learning rate or length, it continues with the learning rates of a new run
    with these settings at that step.

    `given` overrides the job's settings or, when resuming, the earlier ones. `origin`, the command's recipe and
    ranks, is stored for later resumes. Without `known` and `devices` nothing measured before is used.
    `observer(start)` makes a second observer, next to the log. `stop()` returns whether to stop after this step; one
    rank suffices; None stops on SIGINT and SIGTERM, and a second SIGINT quits immediately. `clock` is monotonic, in
    seconds.

    Raises:
        UserError: the folder is in use, or a setting is invalid.
        CheckpointError: the folder has no run to resume, or a checkpoint cannot be written.
        NonFiniteError, RankFailedError: as in `Engine.step`.
        CannotRedoError: memory ran out in a step that ranks cannot repeat. The folder keeps the smaller micro-batch
            size for `resume`.
    """
    begun = clock()
    world = World.from_environment() if world is None else world
    if world.has_model_groups:
        message = (
            f"a recipe needs ranks of one process each, but this world has {world.size} ranks of "
            f"{world.num_processes} processes. Use an Engine in your own loop."
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
            # The user's observer needs the number of steps, so it is created after the run; a backlog keeps records.
            observers = Observers(log, highest) if observer is None else Observers(log, highest, backlog)
            ready = prepare(
                job,
                given or RunConfig(),
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
            session = _Session(ready, place, highest, asked, checkpoint_seconds, clock)
            return _run(session, ready.run.engine, begun)
    except BaseException as error:
        if _keeps_smaller_size(error, place, world):
            raise
        # A new folder without steps would block the same command.
        if header is None and (ready is None or ready.run.engine.num_steps == 0):
            place.clear(world.rank)  # so that the same command works after the cause is fixed
        raise


def _claim(place: RunFolder, held: contextlib.ExitStack, *, resume: bool) -> RunHeader | None:
    """Lock the folder until `held` closes; return the header of the run to resume."""
    header = place.read() if resume else None
    if header is None:
        place.refuse_used()
    held.enter_context(place.locked())
    return header


def _keeps_smaller_size(error: BaseException, place: RunFolder, world: World) -> bool:
    """Store the smaller size to resume with, if a step could not be repeated in smaller micro-batches."""
    if not isinstance(error, CannotRedoError | RankFailedError) or error.smaller_micro_batch_size is None:
        return False
    if world.rank == 0:
        place.write(dataclasses.replace(place.read(), largest_micro_batch_size=error.smaller_micro_batch_size))
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
    """The reason in the log for the end of a run that was asked to stop. Never raised."""


class Backlog:
    """An observer that stores records for another one, created once the run is ready."""

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

    def __init__(  # noqa: PLR0917 (all that a session needs)
        self,
        ready: PreparedRun,
        place: RunFolder,
        highest: PeakMemory,
        asked: Callable[[], bool],
        checkpoint_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._run, self._engine = ready.run, ready.run.engine
        self._rest = ready.rest
        self._num_steps = ready.num_steps
        self._place, self._highest = place, highest
        self._asked, self._checkpoint_seconds, self._clock = asked, checkpoint_seconds, clock
        self._first_step = self._engine.num_steps
        self._evaluated = self._saved = -1
        self._saved_at = clock()
        self._report: StepReport | None = None
        self._num_samples = 0
        self._aside_seconds = 0.0
        self._metrics: Mapping[str, float] = {}

    def run(self, begun: float) -> SessionResult:
        """Step until the data ends or a stop is requested; the session began at `begun`."""
        loop_begun = self._clock()
        stopped = self._step_to_the_end()
        loop_seconds = self._clock() - loop_begun
        found = list_checkpoints(self._place.checkpoints)
        memory = self._highest.record
        return SessionResult(
            folder=self._place,
            stopped=stopped,
            num_steps=self._engine.num_steps,
            num_session_steps=self._engine.num_steps - self._first_step,
            num_session_samples=self._num_samples,
            session_seconds=self._clock() - begun,
            stepping_seconds=loop_seconds - self._aside_seconds,
            peak_bytes=None if memory is None else memory.peak_bytes,
            limit_bytes=None if memory is None else memory.limit_bytes,
            loss=None if self._report is None else self._report.loss,
            metrics=self._metrics,
            checkpoint=found[-1] if found else None,
        )

    def _step_to_the_end(self) -> bool:
        """Return whether the session stopped on request."""
        often = self._steps_per_evaluation()
        for batch in self._rest or ():
            self._report = report = self._engine.step(batch)
            self._num_samples += report.num_samples
            stopping, due = self._agree()
            # A request in the very last step has no effect, because the run is complete.
            if stopping and self._engine.num_steps != self._num_steps:
                self._save()
                return True
            # A position without samples is the start of an epoch: the last epoch just ended.
            ends_epoch = report.position.sample_offset == 0
            if ends_epoch or (often and self._engine.num_steps % often == 0):
                self._evaluate()
            if ends_epoch or due:
                self._save()
        self._evaluate()
        if self._report is not None:
            self._save()
        return False

    def _agree(self) -> tuple[bool, bool]:
        """Return whether to stop, which any rank may request, and whether to save, which rank 0's clock decides."""
        is_due = self._clock() - self._saved_at >= self._checkpoint_seconds
        # Signals arrive at different times and clocks differ, but all ranks must stop and save after the same step.
        votes = self._engine.world.gather_numbers([self._asked(), is_due])
        return any(asked for asked, _ in votes), bool(votes[0][1])

    def _steps_per_evaluation(self) -> int | None:
        """Return the steps between evaluations of a run shorter than an epoch; None: evaluate at the end of epochs."""
        # Under a ramp epochs differ in length; a run of whole epochs is never shorter than one.
        if self._rest is None or self._num_steps is None or self._rest.request.epochs is not None:
            return None
        try:
            epoch = self._rest.steps_per_epoch
        except TypeError:
            # Data without a length has no known end of an epoch.
            epoch = self._num_steps + 1
        return max(1, ceil_div(self._num_steps, NUM_EVALUATIONS)) if self._num_steps < epoch else None

    def _evaluate(self) -> None:
        if self._evaluated != self._engine.num_steps:
            with self._aside():
                self._metrics = self._run.evaluate()
            self._evaluated = self._engine.num_steps

    def _save(self) -> None:
        # The end of an epoch and the clock may both request a checkpoint of the same step.
        if self._saved != self._engine.num_steps:
            with self._aside():
                self._engine.save(self._place.checkpoints)
            self._saved = self._engine.num_steps
            self._saved_at = self._clock()

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Exclude the time of evaluations and checkpoints from the time of steps."""
        begun = self._clock()
        yield
        self._aside_seconds += self._clock() - begun
