"""One run streamed to many pages: complete, in order, once; a slow page loses progress lines."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from anybatch_guide.guard import Message
from anybatch_guide.limits import Limits
from anybatch_guide.stream import Ring, RingFullError, Stream
from guide.tests.served import parsed

FAST = Limits(messages_per_second=1e9)
Event = tuple[str, Any, str | None]


class Page:
    """A page that reads a stream at a controlled speed."""

    def __init__(self, stream: Stream, last: str | None = None) -> None:
        self.status = 0
        self.text = b""
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.may_stay = asyncio.Event()
        self._grown = asyncio.Condition()
        headers = [] if last is None else [(b"last-event-id", last.encode())]
        scope = {"type": "http", "method": "GET", "headers": headers}
        self._task = asyncio.ensure_future(stream(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.may_stay.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_read.wait()
        async with self._grown:
            self.status = message.get("status", self.status)
            self.text += message.get("body", b"")
            self._grown.notify_all()

    def events(self) -> list[Event]:
        """Return the events so far."""
        return list(parsed(iter(self.text.splitlines())))

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines so far."""
        return [line for event, data, _ in self.events() if event == "lines" for line in data["lines"]]

    async def until(self, holds: Callable[["Page"], bool]) -> None:
        """Read until a condition is true."""
        async with asyncio.timeout(60), self._grown:
            await self._grown.wait_for(lambda: holds(self))

    async def end(self) -> None:
        """Wait until the stream is over."""
        async with asyncio.timeout(60):
            await self._task

    async def leave(self) -> None:
        """Close the tab."""
        self.may_stay.set()
        await self.end()


def zero() -> float:
    """Return a constant time."""
    return 0.0


def micro_batch(number: int) -> dict[str, Any]:
    """Return a progress line."""
    return {"kind": "micro_batch", "number": number}


def test_every_page_gets_everything() -> None:
    """An early and a late page get the same lines, in order; the status comes first."""

    async def scene() -> None:
        stream = Stream(FAST, zero)
        stream.publish("status", {"worker": "idle"})
        early = Page(stream)
        await early.until(lambda page: page.text != b"")
        stream.begin()
        stream.publish("status", {"worker": "running"})
        for number in range(1000):
            stream.publish_line("run", micro_batch(number))
        late = Page(stream)
        await late.until(lambda page: page.text != b"")
        stream.publish("result", {"run": "run", "recording": {}}, "run")
        stream.publish("status", {"worker": "idle"})
        for page in (early, late):
            await page.until(
                lambda page: page.events()[-1][:2] == ("status", {"worker": "idle"}) and bool(page.lines())
            )
            assert [line["number"] for line in page.lines()] == list(range(1000))
            assert [event for event, _, _ in page.events()].index("result") > 0
        assert [data["worker"] for event, data, _ in early.events() if event == "status"] == ["idle", "running", "idle"]
        assert late.events()[0][:2] == ("status", {"worker": "running"})
        await early.leave()
        await late.leave()

    asyncio.run(scene())


def test_page_reconnects() -> None:
    """A page that sends its last event id gets the later events, without duplicates."""

    async def scene() -> None:
        stream = Stream(FAST, zero)
        page = Page(stream)
        for number in range(3):
            stream.publish_line("run", micro_batch(number))
        await page.until(lambda page: len(page.lines()) == 3)
        last = page.events()[-1][2]
        await page.leave()
        for number in range(3, 6):
            stream.publish_line("run", micro_batch(number))
        again = Page(stream, last)
        await again.until(lambda page: len(page.lines()) == 3)
        assert [line["number"] for line in again.lines()] == [3, 4, 5]
        await again.leave()

    asyncio.run(scene())


def test_slow_page_loses_progress_first() -> None:
    """A page with a large backlog misses micro-batches, gets their number, and every step, measurement and end."""

    async def scene() -> None:
        stream = Stream(Limits(messages_per_second=1e9, max_backlog_lines=100), zero)
        page = Page(stream)
        await page.until(lambda page: page.text != b"")
        page.may_read.clear()
        stream.publish_line("run", micro_batch(-1))
        await asyncio.sleep(0)  # it takes that line now, and is stuck with it
        for number in range(1000):
            stream.publish_line("run", micro_batch(number))
            if number % 100 == 0:
                stream.publish_line("run", {"kind": "step", "number": number})
        measured = ("guide.first_update", "guide.native", "guide.memory", "guide.evaluation", "guide.surface")
        for kind in ("diagnosis", *measured, "end"):
            stream.publish_line("run", {"kind": kind})
        page.may_read.set()
        await page.until(lambda page: any(line["kind"] == "end" for line in page.lines()))
        kinds = [line["kind"] for line in page.lines()]
        dropped = sum(data["dropped"] for event, data, _ in page.events() if event == "lines")
        assert (kinds.count("step"), kinds.count("diagnosis"), kinds.count("end")) == (10, 1, 1)
        assert [kind for kind in kinds if kind.startswith("guide.")] == list(measured)
        assert dropped > 800
        assert kinds.count("micro_batch") + dropped == 1001
        await page.leave()

    asyncio.run(scene())


def test_ring_drops_progress_first() -> None:
    """A full ring drops the oldest progress lines; if only others are left, it raises."""
    ring = Ring(Limits(ring_lines=10))
    for number in range(20):
        ring.add("lines", "run", json.dumps(number), is_progress=number % 4 != 0)
    kept = [int(entry.text) for entry in ring.after(0)]

    assert [number for number in kept if number % 4 == 0] == [0, 4, 8, 12, 16]
    assert [number for number in kept if number % 4 != 0] == [14, 15, 17, 18, 19]
    for number in range(5):
        ring.add("lines", "run", json.dumps(number))
    with pytest.raises(RingFullError):
        ring.add("lines", "run", "one too many")


def test_a_closing_server_ends_its_streams() -> None:
    """A stopping server sends the remaining lines, then a close event, so that pages do not reconnect."""

    async def scene() -> None:
        stream = Stream(FAST, zero)
        page = Page(stream)
        await page.until(lambda page: page.status == 200)
        stream.publish_line("run", micro_batch(0))
        stream.close()
        await page.end()
        assert [event for event, _, _ in page.events()] == ["status", "lines", "close"]

    asyncio.run(scene())
