"""Runs in a real worker: started, paused, stepped, cancelled and limited, with a fake clock."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from anybatch_guide.limits import Limits
from anybatch_guide.runs import RefusedError, Runs
from anybatch_guide.stream import Stream
from guide.tests.served import LIMITS, WORKER
from guide.tests.test_stream import Page
from guide.tests.worker import NUM_MICRO_BATCHES, NUM_STEPS

pytestmark = pytest.mark.slow

MIB = 2**20
USUAL = Limits(messages_per_second=1e9, check_seconds=0.01, **{**LIMITS, "starts_per_second": 2})
Scene = Coroutine[Any, Any, None]


class Desk:
    """A worker with one watching page, and a fake clock."""

    def __init__(self, limits: Limits, *, keep: bool = False, command: tuple[str, ...] = WORKER) -> None:
        self.now = 0.0
        self.stream = Stream(limits, lambda: self.now)
        self.runs = Runs(self.stream, limits, lambda: self.now, command=command, keep=keep)
        self.page = Page(self.stream)

    async def begin(self, name: str, *, paused: bool = False) -> str:
        """Start an experiment, a second after the previous one."""
        self.now += 1.0
        return await self.runs.begin({"kind": "experiment", "name": name}, paused=paused)

    async def until(self, event: str, run: str) -> Any:
        """Wait for an event of a run, and return its data."""
        await self.page.until(
            lambda page: any(found == event and data.get("run") == run for found, data, _ in page.events())
        )
        return next(data for found, data, _ in self.page.events() if found == event and data.get("run") == run)

    async def until_idle(self) -> None:
        """Wait until the last status is idle."""
        await self.page.until(lambda _page: json.loads(self.stream.status)["worker"] == "idle")

    def lines(self, run: str) -> list[dict[str, Any]]:
        """Return the lines of a run so far."""
        told = [data for event, data, _ in self.page.events() if event == "lines" and data["run"] == run]
        return [line for data in told for line in data["lines"]]


@asynccontextmanager
async def open_desk(limits: Limits, **options: Any) -> AsyncIterator[Desk]:
    """Open a desk whose worker is warm, and close it."""
    desk = Desk(limits, **options)
    desk.runs.open()
    try:
        await desk.until_idle()
        yield desk
    finally:
        await desk.page.leave()
        await desk.runs.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of this file."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def play(runner: asyncio.Runner) -> Iterator["Play"]:
    """Return a function that runs a coroutine with one shared desk and worker."""
    context = open_desk(USUAL)
    desk = runner.run(context.__aenter__())
    yield lambda scene: runner.run(scene(desk))
    runner.run(context.__aexit__(None, None, None))


Play = Callable[[Callable[[Desk], Scene]], None]


def test_run(play: Play) -> None:
    """A run sends its lines in order, then its result with provenance; NaN and infinity are strings."""

    async def scene(desk: Desk) -> None:
        run = await desk.begin("counting")
        result = await desk.until("result", run)
        await desk.until_idle()
        assert [line["kind"] for line in desk.lines(run)].count("micro_batch") == 2 * NUM_STEPS * NUM_MICRO_BATCHES
        assert [line["loss"] for line in desk.lines(run) if line["kind"] == "step"] == ["NaN"] * NUM_STEPS
        recording = result["recording"]
        assert recording["data"] == {"steps": NUM_STEPS, "worst": "Infinity"}
        assert recording["made"]["command"] == "anybatch guide record counting"
        assert set(recording["made"]["versions"]) == {"anybatch", "torch", "python"}

    play(scene)


def test_simultaneous_requests(play: Play) -> None:
    """Of two simultaneous requests, one is accepted, and the other gets its id."""

    async def scene(desk: Desk) -> None:
        desk.now += 1.0
        asked = [desk.runs.begin({"kind": "experiment", "name": "counting"}) for _ in range(2)]
        one, other = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(one, str)
        assert isinstance(other, RefusedError)
        assert (other.status, other.failure.code, other.run) == (409, "busy", one)
        await desk.until_idle()

    play(scene)


def test_start_rate_is_limited(play: Play) -> None:
    """At most two runs start per second."""

    async def scene(desk: Desk) -> None:
        desk.now += 1.0
        for _ in range(2):
            await desk.runs.begin({"kind": "experiment", "name": "counting"})
            await desk.until_idle()
        with pytest.raises(RefusedError) as refused:
            await desk.runs.begin({"kind": "experiment", "name": "counting"})
        assert (refused.value.status, refused.value.failure.code) == (429, "often")
        await desk.begin("counting")
        await desk.until_idle()

    play(scene)


def test_one_micro_batch_at_a_time(play: Play) -> None:
    """A run started paused waits before its first micro-batch; each command runs one; the last makes the step."""

    async def scene(desk: Desk) -> None:
        run = await desk.begin("counting", paused=True)
        for number in range(NUM_MICRO_BATCHES):
            desk.runs.steer(run, "micro")
            await desk.page.until(lambda _, wanted=number + 1: ends(desk, run) == wanted)  # type: ignore[misc]
        await desk.page.until(lambda _: [line["kind"] for line in desk.lines(run)].count("step") == 1)
        assert ends(desk, run) == NUM_MICRO_BATCHES
        assert json.loads(desk.stream.status)["paused"]
        desk.runs.steer(run, "resume")
        await desk.until("result", run)
        await desk.until_idle()
        assert ends(desk, run) == NUM_STEPS * NUM_MICRO_BATCHES

    play(scene)


def ends(desk: Desk, run: str) -> int:
    """Return the number of finished micro-batches of a run."""
    return sum(line["kind"] == "micro_batch" and line["event"] == "end" for line in desk.lines(run))


def test_cancel_in_the_middle(play: Play) -> None:
    """A running run can be cancelled; the worker stays the same, and nothing is sent after the end."""

    async def scene(desk: Desk) -> None:
        worker = desk.runs.worker_pid
        run = await desk.begin("endless")
        await desk.until("lines", run)
        desk.runs.cancel(run)
        await desk.until("cancelled", run)
        await desk.until_idle()
        assert desk.runs.worker_pid == worker
        of_run = [event for event, data, _ in desk.page.events() if data.get("run") == run]
        assert of_run[-1] == "cancelled"

    play(scene)


def test_a_worker_that_ends_is_replaced(runner: asyncio.Runner) -> None:
    """A run that ignores cancellation ends with its process, by SIGTERM or else SIGKILL, and a new worker starts.

    If a worker is killed, its run is reported as ended, and another worker starts and works.
    """

    async def scene() -> None:
        async with open_desk(USUAL) as desk:  # a separate worker, because the test kills it
            for name in ("stuck", "deaf", "endless"):
                worker = desk.runs.worker_pid
                assert worker is not None
                run = await desk.begin(name)
                await desk.until("lines", run)
                if name == "endless":
                    os.kill(worker, signal.SIGKILL)
                    assert (await desk.until("failed", run))["code"] == "worker"
                else:
                    desk.runs.cancel(run)
                    await desk.until("cancelled", run)
                again = await desk.begin("counting")  # waits for the new one
                await desk.until("result", again)
                await desk.until_idle()
                assert desk.runs.worker_pid not in (None, worker)

    runner.run(scene())


def test_failing_run(play: Play) -> None:
    """A failing experiment ends with a short code, without a traceback, and the worker continues."""

    async def scene(desk: Desk) -> None:
        worker = desk.runs.worker_pid
        failed = await desk.until("failed", await desk.begin("failing"))
        await desk.until_idle()
        assert failed["code"] == "error"
        assert "Traceback" not in failed["message"]
        assert desk.runs.worker_pid == worker

    play(scene)


@pytest.mark.parametrize(("seconds", "paused", "code"), [(121.0, False, "time"), (601.0, True, "paused")])
def test_time_is_limited(play: Play, seconds: float, paused: bool, code: str) -> None:
    """A run ends after 120 seconds of running, or 600 seconds of pause; the page knows the limit beforehand."""

    async def scene(desk: Desk) -> None:
        assert json.loads(desk.stream.status)["limit"] == 120
        run = await desk.begin("endless", paused=paused)
        desk.now += seconds
        assert (await desk.until("failed", run))["code"] == code
        await desk.until_idle()

    play(scene)


def test_an_unwatched_run_ends(play: Play) -> None:
    """A run without a watching page for a minute is ended."""

    async def scene(desk: Desk) -> None:
        run = await desk.begin("endless")
        await desk.page.leave()
        desk.now += 61.0
        async with asyncio.timeout(60):
            while json.loads(desk.stream.status)["worker"] != "idle":  # noqa: ASYNC110 (nobody watches)
                await asyncio.sleep(0.01)
        desk.page = Page(desk.stream)
        assert (await desk.until("failed", run))["code"] == "alone"

    play(scene)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="this system does not report memory of processes")  # noqa: PTH110 (a condition)
def test_memory_is_limited(runner: asyncio.Runner) -> None:
    """A run whose process exceeds the memory limit is ended, with its process if necessary."""

    async def scene() -> None:
        limits = Limits(messages_per_second=1e9, check_seconds=0.01, resident_bytes=600 * MIB, **LIMITS)
        async with open_desk(limits) as desk:
            run = await desk.begin("greedy")
            assert (await desk.until("failed", run))["code"] == "memory"
            await desk.until_idle()

    runner.run(scene())


def test_worker_that_cannot_start(runner: asyncio.Runner, capsys: pytest.CaptureFixture[str]) -> None:
    """If no worker can start, a request for a run is answered in time, and everything can be closed."""

    async def scene(command: tuple[str, ...]) -> None:
        limits = Limits(**{**LIMITS, "answer_seconds": 0.5})
        desk = Desk(limits, command=command)
        desk.runs.open()
        with pytest.raises(RefusedError) as refused:
            await desk.begin("counting")
        assert (refused.value.status, refused.value.failure.code) == (503, "worker")
        await desk.page.leave()
        await desk.runs.close()

    runner.run(scene(("/no/such/program",)))
    assert "cannot be started" in capsys.readouterr().err
    runner.run(scene((sys.executable, "-c", "print('no JSON')")))
    runner.run(scene((sys.executable, "-c", "import signal; signal.pause()")))
