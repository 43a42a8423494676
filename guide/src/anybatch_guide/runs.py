"""`Runs`: one run at a time in a worker process, with pause, cancel and limits, streamed to the pages."""

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
    """A failure that the page shows."""

    code: str  # a short, stable word
    message: str  # a sentence for the user


class RefusedError(UserError):
    """A run was refused, or a command was for an unknown run."""

    def __init__(self, status: HTTPStatus, failure: Failure, run: str | None = None) -> None:
        super().__init__(failure.message)
        self.status = status
        self.failure = failure
        self.run = run


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """The current run."""

    id: str  # random id
    request: Mapping[str, Any]  # the request: kind, and name or setting
    is_paused: bool  # whether the run is paused
    accepted: "asyncio.Future[Failure | None]"  # resolves to None when the worker accepts the run, or to a failure
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # set when the run ends
    # the reason for ending the run: a failure, "cancel" if a page cancelled it, or None
    end_reason: Failure | Literal["cancel"] | None = None
    active_seconds: float = 0.0  # running time
    idle_seconds: float = 0.0  # length of the current pause


class Runs:
    """The worker and its current run."""

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
        self._num_skipped = 0  # invalid or too long lines of the latest run
        self.provenance: Mapping[str, Any] | None = None

    @property
    def worker_pid(self) -> int | None:
        """The process id of the worker; None without a worker."""
        return None if self._process is None else self._process.process_id

    def open(self) -> None:
        """Start the worker, and restart it whenever it ends."""
        self._publish_status()
        self._spawn(self._keep_worker())

    async def close(self) -> None:
        """End the worker and all tasks of this object."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        # Wait for the tasks, because they end the worker when cancelled.
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def begin(self, request: Mapping[str, Any], *, paused: bool = False) -> str:
        """Start a run and return its id, once the worker has accepted it."""
        run = self._claim(
            request, paused=paused
        )  # before the first await, so that two requests cannot both start a run
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                await self._ready.wait()
                assert self._process is not None
                self._process.send({"do": "run", "id": run.id, **request, "paused": paused})
                failure = await run.accepted
        except TimeoutError:
            failure = Failure("worker", "The worker process does not respond.")
            self._end_soon(run, failure)
        if failure is None:
            return run.id
        status = {"worker": HTTPStatus.SERVICE_UNAVAILABLE, "error": HTTPStatus.INTERNAL_SERVER_ERROR}
        raise RefusedError(status.get(failure.code, HTTPStatus.UNPROCESSABLE_ENTITY), failure)

    def steer(self, run_id: str, do: Literal["pause", "resume", "micro"]) -> None:
        """Pause a run, resume it, or run one micro-batch and pause."""
        run = self._current(run_id)
        # After a single micro-batch, the run is paused again.
        run.is_paused = do != "resume"
        # The pause limit counts from the last command, because stepping shows that the page is in use.
        run.idle_seconds = 0.0
        assert self._process is not None
        self._process.send({"do": do})
        self._publish_status()

    def cancel(self, run_id: str) -> None:
        """Cancel a run; kill the worker if the run does not end in time."""
        self._end_soon(self._current(run_id), "cancel")

    def _claim(self, request: Mapping[str, Any], *, paused: bool) -> LiveRun:
        now = self._clock()
        if self._run is not None:
            failure = Failure("busy", "Another run is in progress.")
            raise RefusedError(HTTPStatus.CONFLICT, failure, self._run.id)
        # The deque has the latest starts: if the oldest is less than a second ago, the limit is reached.
        if len(self._starts) == self._limits.starts_per_second and now - self._starts[0] < 1.0:
            failure = Failure("often", f"At most {self._limits.starts_per_second} runs can start per second.")
            raise RefusedError(HTTPStatus.TOO_MANY_REQUESTS, failure)
        self._starts.append(now)
        run_id = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
        accepted = asyncio.get_running_loop().create_future()
        self._run = LiveRun(id=run_id, request=request, is_paused=paused, accepted=accepted)
        return self._run

    def _current(self, run_id: str) -> LiveRun:
        if self._run is None or self._run.id != run_id or not self._run.accepted.done():
            raise RefusedError(HTTPStatus.NOT_FOUND, Failure("unknown_run", "This run has ended or does not exist."))
        return self._run

    async def _keep_worker(self) -> None:
        """Keep a worker running: when it ends, start another one."""
        retry_seconds = _FIRST_RETRY_SECONDS
        while not self._is_closing:
            await self._serve_worker()
            # Restart immediately if the worker was ready; otherwise after increasing delays.
            retry_seconds = _FIRST_RETRY_SECONDS if self._ready.is_set() else 2 * retry_seconds
            self._ready.clear()
            self._state = "restarting"
            self._finish_lost_run()
            self._publish_status()
            await asyncio.sleep(min(retry_seconds, self._limits.retry_seconds))

    async def _serve_worker(self) -> None:
        """Start a worker and process its messages until it ends."""
        try:
            process = self._process = await WorkerProcess.start(self._command, self._limits)
        # Continue without a worker, and retry later.
        except OSError as error:
            sys.stderr.write(f"anybatch guide: the worker process cannot be started: {error}\n")
            return
        try:
            async for answer in process.answers():
                self._process_answer(answer)
        finally:
            # Forget the worker first, so that no command is sent to the ending process.
            self._process = None
            await process.end(self._limits)

    def _process_answer(self, answer: Mapping[str, Any]) -> None:
        """Process one message of the worker."""
        if "ready" in answer:
            self.provenance = answer["made"]
            self._state = "idle"
            self._ready.set()
            self._publish_status()
            return
        run = self._run
        # Ignore late messages about a run that has ended.
        if run is None or answer.get("id") != run.id:
            return
        if "started" in answer:
            self._confirm_start(run)
        elif "lines" in answer:
            self._publish_lines(run, answer["lines"])
        elif "result" in answer:
            self._stream.publish("result", {"run": run.id, "recording": answer["result"]}, run.id)
        elif "failed" in answer:
            self._finish(run, Failure(**answer["failed"]))
        elif "cancelled" in answer:
            self._finish(run, run.end_reason or "cancel")
        elif "done" in answer:
            self._finish(run, None)

    def _confirm_start(self, run: LiveRun) -> None:
        if run.accepted.done():  # too late: the run is ending
            return
        run.accepted.set_result(None)
        self._state = "running"
        self._num_skipped = 0
        self._stream.begin()
        self._publish_status()
        # Read the clock here, because the task starts later.
        self._spawn(self._watch(run, self._clock()))

    def _publish_lines(self, run: LiveRun, lines: Sequence[Any]) -> None:
        for line in lines:
            if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
                self._num_skipped += 1
                continue
            try:
                self._num_skipped += not self._stream.publish_line(run.id, line)
            except RingFullError:
                self._end_soon(run, Failure("lines", "The run wrote more lines than can be kept."))

    def _finish(self, run: LiveRun, cause: Failure | Literal["cancel"] | None) -> None:
        """Finish a run that completed, failed, was refused or cancelled, and publish the cause."""
        # The request still waits if the run was refused, or ended before it started.
        if not run.accepted.done():
            run.accepted.set_result(cause if isinstance(cause, Failure) else Failure("cancelled", "It was cancelled."))
        elif isinstance(cause, Failure):
            self._stream.publish("failed", {"run": run.id, "code": cause.code, "message": cause.message}, run.id)
        elif cause == "cancel":
            self._stream.publish("cancelled", {"run": run.id}, run.id)
        self._run = None
        run.ended.set()
        if self._state == "running":
            self._state = "idle"
            self._publish_status()

    def _finish_lost_run(self) -> None:
        """Finish the run of a worker that has ended."""
        if self._run is not None:
            failure = Failure("worker", "The worker process ended and is being restarted.")
            self._finish(self._run, self._run.end_reason or failure)

    async def _watch(self, run: LiveRun, before: float) -> None:
        """Check a run at intervals until it ends or exceeds a limit; `before` is the time of its start."""
        while not run.ended.is_set():
            try:
                # Wait for the end of the run, and check it after each timeout.
                async with asyncio.timeout(self._limits.check_seconds):
                    await run.ended.wait()
            except TimeoutError:
                now = self._clock()
                run.active_seconds += 0.0 if run.is_paused else now - before
                run.idle_seconds += now - before if run.is_paused else 0.0
                before = now
                failure = self._exceeded_limit(run)
                if failure is not None:
                    self._end_soon(run, failure)
                    return

    def _exceeded_limit(self, run: LiveRun) -> Failure | None:
        limits = self._limits
        if run.active_seconds > limits.wall_seconds:
            return Failure("time", f"The run took more than {limits.wall_seconds:g} seconds.")
        if run.idle_seconds > limits.paused_seconds:
            return Failure("paused", f"The run was paused for more than {limits.paused_seconds:g} seconds.")
        if not self._keep and self._stream.unwatched_seconds > limits.unwatched_seconds:
            return Failure("alone", f"No page has watched the run for {limits.unwatched_seconds:g} seconds.")
        resident_bytes = None if self._process is None else self._process.resident_bytes()
        if resident_bytes is not None and resident_bytes > limits.resident_bytes:
            return Failure("memory", f"The run used more than {limits.resident_bytes / 2**30:g} GiB of memory.")
        return None

    def _end_soon(self, run: LiveRun, reason: Failure | Literal["cancel"]) -> None:
        # Keep the first reason, and end the run only once.
        if run.end_reason is None:
            run.end_reason = reason
            self._spawn(self._end(run))

    async def _end(self, run: LiveRun) -> None:
        """End a run: cancel it, then send SIGTERM to its process, then SIGKILL."""
        process = self._process
        if process is None:
            return
        process.send({"do": "cancel"})
        limits = self._limits
        for seconds, signal_number in (
            (limits.terminate_seconds, signal.SIGTERM),
            (limits.kill_seconds - limits.terminate_seconds, signal.SIGKILL),
        ):
            try:
                async with asyncio.timeout(seconds):
                    await run.ended.wait()
            except TimeoutError:
                process.signal(signal_number)
            else:
                return

    def _publish_status(self) -> None:
        run = self._run if self._state == "running" else None
        status: dict[str, Any] = {"worker": self._state, "run": None, "paused": False}
        status |= {"skipped": self._num_skipped, "limit": self._limits.wall_seconds}
        if run is not None:
            status |= {"run": run.id, **run.request, "paused": run.is_paused}
        self._stream.publish("status", status)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        # Keep a reference, because asyncio's are weak: otherwise a task could be garbage-collected before it ends.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
