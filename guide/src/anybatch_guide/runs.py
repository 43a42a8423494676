"""One run at a time, in a process of its own: begun, paused, cancelled, limited, and streamed to the pages."""

import asyncio
import secrets
import signal
import string
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final, Literal

from anybatch.errors import UserError
from anybatch_guide.limits import Limits
from anybatch_guide.stream import RingFullError, Stream
from anybatch_guide.worker_process import COMMAND, WorkerProcess

_ALPHABET: Final = string.digits + string.ascii_lowercase
_ID_LENGTH: Final = 12
_FIRST_RETRY_SECONDS: Final = 0.1
State = Literal["warming", "idle", "running", "restarting"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something did not work, as the page shows it.

    Attributes:
        code: a short word, the same every time.
        message: a sentence.
    """

    code: str
    message: str


class RefusedError(UserError):
    """A run that is not begun, or a command for one that is not there.

    Attributes:
        status: what HTTP says.
        failure: what the page shows.
        run: the run that goes on instead; None if there is none.
    """

    def __init__(self, status: HTTPStatus, failure: Failure, run: str | None = None) -> None:
        super().__init__(failure.message)
        self.status = status
        self.failure = failure
        self.run = run


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """A run that is under way.

    Attributes:
        id: its name, drawn at random.
        request: what was asked for: kind, and name or setting.
        is_paused: whether it stands still.
        accepted: becomes None once the worker takes it, and a failure if it refuses.
        over: set when it is over.
        ending: why it is being ended; a failure, "cancel" if a page asked for that, or None.
        active_seconds: for which it has run.
        idle_seconds: for which it has been paused, since it last ran.
    """

    id: str
    request: Mapping[str, Any]
    is_paused: bool
    accepted: "asyncio.Future[Failure | None]"
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Failure | Literal["cancel"] | None = None
    active_seconds: float = 0.0
    idle_seconds: float = 0.0


class Runs:
    """The worker and the run it has.

    Args:
        stream: where lines and events go.
        limits: of a run.
        clock: monotonic time in seconds.
        command: starts the worker.
        keep: whether a run goes on that no page watches.
    """

    def __init__(
        self,
        stream: Stream,
        limits: Limits,
        clock: Callable[[], float],
        *,
        command: Sequence[str] = COMMAND,
        keep: bool = False,
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._clock = clock
        self._command = command
        self._keep = keep
        self._state: State = "warming"
        self._run: LiveRun | None = None
        self._process: WorkerProcess | None = None
        self._ready = asyncio.Event()
        self._starts: deque[float] = deque(maxlen=limits.starts_per_second)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._num_skipped = 0  # lines of the latest run that were no lines, or too long
        self.made: Mapping[str, Any] | None = None

    @property
    def worker_number(self) -> int | None:
        """The number of the worker's process; None while there is none."""
        return None if self._process is None else self._process.number

    def open(self) -> None:
        """Start the worker, and keep one there from now on."""
        self._publish_status()
        self._spawn(self._keep_worker())

    async def close(self) -> None:
        """End the worker and everything that was begun here."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        # Tasks end the worker when they are cancelled, so they are waited for.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, request: Mapping[str, Any], *, paused: bool = False) -> str:
        """Begin a run and return its id, once the worker has taken it.

        Raises:
            RefusedError: another one is under way, or the worker does not take this one.
        """
        run = self._claimed(request, paused=paused)  # nothing is awaited before: two requests cannot both find it free
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                await self._ready.wait()
                assert self._process is not None
                self._process.send({"do": "run", "id": run.id, **request, "paused": paused})
                failure = await run.accepted
        except TimeoutError:
            failure = Failure("worker", "The process that computes does not answer.")
            self._end_soon(run, failure)
        if failure is None:
            return run.id
        status = {"worker": HTTPStatus.SERVICE_UNAVAILABLE, "error": HTTPStatus.INTERNAL_SERVER_ERROR}
        raise RefusedError(status.get(failure.code, HTTPStatus.UNPROCESSABLE_ENTITY), failure)

    def steer(self, run_id: str, do: Literal["pause", "resume", "micro"]) -> None:
        """Pause a run, let it go on, or let it run one micro-batch and pause.

        Raises:
            RefusedError: it is not the run that is under way.
        """
        run = self._current(run_id)
        # After a single micro-batch the run stands still again.
        run.is_paused = do != "resume"
        # The limit on pauses counts from the last command: stepping by micro-batches shows that the page is in use.
        run.idle_seconds = 0.0
        assert self._process is not None
        self._process.send({"do": do})
        self._publish_status()

    def cancel(self, run_id: str) -> None:
        """Ask a run to end, and see to it that it does.

        Raises:
            RefusedError: it is not the run that is under way.
        """
        self._end_soon(self._current(run_id), "cancel")

    def _claimed(self, request: Mapping[str, Any], *, paused: bool) -> LiveRun:
        now = self._clock()
        if self._run is not None:
            failure = Failure("busy", "Another run is under way.")
            raise RefusedError(HTTPStatus.CONFLICT, failure, self._run.id)
        # The deque has the latest starts: if its oldest is less than a second old, the limit is reached.
        if len(self._starts) == self._limits.starts_per_second and now - self._starts[0] < 1.0:
            failure = Failure("often", f"At most {self._limits.starts_per_second} runs are begun in a second.")
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, failure)
        self._starts.append(now)
        run_id = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
        accepted = asyncio.get_running_loop().create_future()
        self._run = LiveRun(id=run_id, request=request, is_paused=paused, accepted=accepted)
        return self._run

    def _current(self, run_id: str) -> LiveRun:
        if self._run is None or self._run.id != run_id or not self._run.accepted.done():
            raise RefusedError(HTTPStatus.NOT_FOUND, Failure("unknown_run", "There is no such run, or it is over."))
        return self._run

    async def _keep_worker(self) -> None:
        """Have a worker, for ever: when one ends, another is started."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while not self._is_closing:
            await self._listen()
            # A worker that was ready once is restarted at once; one that never gets there, at ever longer intervals.
            retry_seconds = _FIRST_RETRY_SECONDS if self._ready.is_set() else 2 * retry_seconds
            self._ready.clear()
            self._state = "restarting"
            self._lost()
            self._publish_status()
            await asyncio.sleep(min(retry_seconds, self._limits.retry_seconds))

    async def _listen(self) -> None:
        """Start a worker and hear it out."""
        try:
            process = self._process = await WorkerProcess.start(self._command, self._limits)
        # The server goes on without a worker, and tries again later.
        except OSError as error:
            sys.stderr.write(f"anybatch guide: the process that computes cannot be started: {error}\n")
            return
        try:
            async for answer in process.answers():
                self._hear(answer)
        finally:
            # First of all, so that no command is sent to a process that is being ended.
            self._process = None
            await process.end(self._limits)

    def _hear(self, answer: Mapping[str, Any]) -> None:
        """Take one answer of the worker."""
        if "ready" in answer:
            self.made = answer["made"]
            self._state = "idle"
            self._ready.set()
            self._publish_status()
            return
        run = self._run
        # An answer about a run that is over comes too late.
        if run is None or answer.get("id") != run.id:
            return
        if "started" in answer:
            self._begun(run)
        elif "lines" in answer:
            self._pass_on(run, answer["lines"])
        elif "result" in answer:
            self._stream.publish("result", {"run": run.id, "recording": answer["result"]}, run.id)
        elif "failed" in answer:
            self._over(run, Failure(**answer["failed"]))
        elif "cancelled" in answer:
            self._over(run, run.ending or "cancel")
        elif "done" in answer:
            self._over(run, None)

    def _begun(self, run: LiveRun) -> None:
        if run.accepted.done():  # too late: it is being ended
            return
        run.accepted.set_result(None)
        self._state = "running"
        self._num_skipped = 0
        self._stream.begin()
        self._publish_status()
        # The time is taken here, since the task itself begins later.
        self._spawn(self._watch(run, self._clock()))

    def _pass_on(self, run: LiveRun, lines: Sequence[Any]) -> None:
        for line in lines:
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                self._num_skipped += 1
                continue
            try:
                self._num_skipped += not self._stream.publish_line(run.id, line)
            except RingFullError:
                self._end_soon(run, Failure("lines", "The run has written more lines than can be kept."))

    def _over(self, run: LiveRun, ended: Failure | Literal["cancel"] | None) -> None:
        """Close a run: it was refused, or failed, or was cancelled, or went through."""
        # It was refused, or ended before it began: the request for it is still waiting.
        if not run.accepted.done():
            run.accepted.set_result(ended if isinstance(ended, Failure) else Failure("cancelled", "It was cancelled."))
        elif isinstance(ended, Failure):
            self._stream.publish("failed", {"run": run.id, "code": ended.code, "message": ended.message}, run.id)
        elif ended == "cancel":
            self._stream.publish("cancelled", {"run": run.id}, run.id)
        self._run = None
        run.over.set()
        if self._state == "running":
            self._state = "idle"
            self._publish_status()

    def _lost(self) -> None:
        """The worker has ended: so has its run."""
        if self._run is not None:
            lost = Failure("worker", "The process that computes has ended; another one is started.")
            self._over(self._run, self._run.ending or lost)

    async def _watch(self, run: LiveRun, before: float) -> None:
        """Look at a run from time to time, from `before` on, until it is over or has taken more than it may."""
        while not run.over.is_set():
            try:
                # Waits for the end of the run, and looks at it each time that takes longer.
                async with asyncio.timeout(self._limits.look_seconds):
                    await run.over.wait()
            except TimeoutError:
                now = self._clock()
                run.active_seconds += 0.0 if run.is_paused else now - before
                run.idle_seconds += now - before if run.is_paused else 0.0
                before = now
                failure = self._too_much(run)
                if failure is not None:
                    self._end_soon(run, failure)
                    return

    def _too_much(self, run: LiveRun) -> Failure | None:
        limits = self._limits
        if run.active_seconds > limits.wall_seconds:
            return Failure("time", f"It took more than {limits.wall_seconds:g} seconds.")
        if run.idle_seconds > limits.paused_seconds:
            return Failure("paused", f"It was paused for more than {limits.paused_seconds:g} seconds.")
        if not self._keep and self._stream.alone_seconds > limits.alone_seconds:
            return Failure("alone", f"No page has watched it for {limits.alone_seconds:g} seconds.")
        resident_bytes = None if self._process is None else self._process.resident_bytes()
        if resident_bytes is not None and resident_bytes > limits.resident_bytes:
            return Failure("memory", f"It took more than {limits.resident_bytes / 2**30:g} GiB of memory.")
        return None

    def _end_soon(self, run: LiveRun, reason: Failure | Literal["cancel"]) -> None:
        # The first reason counts, and a run is ended once.
        if run.ending is None:
            run.ending = reason
            self._spawn(self._end(run))

    async def _end(self, run: LiveRun) -> None:
        """End a run: it is asked to, then its process is, then that is not asked any more."""
        process = self._process
        if process is None:
            return
        process.send({"do": "cancel"})
        limits = self._limits
        for seconds, number in (
            (limits.terminate_seconds, signal.SIGTERM),
            (limits.kill_seconds - limits.terminate_seconds, signal.SIGKILL),
        ):
            try:
                async with asyncio.timeout(seconds):
                    await run.over.wait()
            except TimeoutError:
                process.signal(number)
            else:
                return

    def _publish_status(self) -> None:
        run = self._run if self._state == "running" else None
        status: dict[str, Any] = {"worker": self._state, "run": None, "paused": False, "skipped": self._num_skipped}
        if run is not None:
            status |= {"run": run.id, **run.request, "paused": run.is_paused}
        self._stream.publish("status", status)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # asyncio keeps weak references only: without this one a task could vanish before it ends.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
