"""Stream the lines of one run to many pages: lines are kept in a ring buffer, and each page reads at its own speed.

A stream is server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html). Every message with
lines has an id; a page that reconnects sends the last id it saw, and continues after it. The only state per reader
is its position: a slow reader with a large backlog gets no progress lines. All readers get the
essential lines (start, step, diagnosis, end and similar).
"""

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from anybatch_guide.guard import Answer, Receive, Scope, Send
from anybatch_guide.limits import Limits

StreamLine = Mapping[str, Any]
ESSENTIAL_KINDS: Final = frozenset({
    "start", "step", "diagnosis", "evaluate", "checkpoint", "out_of_memory", "end", "guide.match", "guide.native",
    "guide.first_update", "guide.memory", "guide.evaluation", "guide.surface"
})  # fmt: skip

_MAX_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the stream: a line of a run, or another event."""

    number: int  # its index among all entries of this server
    event: str  # "lines" for a line, else the event
    run: str | None  # its run; None for a status
    text: str  # its JSON text
    is_progress: bool  # whether it only shows progress


class RingFullError(Exception):
    """A run wrote more essential lines than can be kept."""


class Ring:
    """A ring buffer of the lines of the latest run; if it is full, it drops the oldest progress lines."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[int, Entry] = {}
        self._progress_numbers: deque[int] = deque()
        self._num_bytes = 0
        self.last = 0

    def clear(self) -> None:
        """Drop all entries, but keep counting numbers."""
        self._entries.clear()
        self._progress_numbers.clear()
        self._num_bytes = 0

    def add(self, event: str, run: str | None, text: str, *, is_progress: bool = False) -> None:
        """Add an entry."""
        self.last += 1
        self._entries[self.last] = Entry(self.last, event, run, text, is_progress)
        self._num_bytes += len(text)
        if is_progress:
            self._progress_numbers.append(self.last)
        while len(self._entries) > self._limits.ring_lines or self._num_bytes > self._limits.ring_bytes:
            if not self._progress_numbers:
                # Events other than lines are few and small, and do not count towards the limit.
                if event == "lines":
                    raise RingFullError
                return
            self._num_bytes -= len(self._entries.pop(self._progress_numbers.popleft()).text)

    def after(self, number: int) -> Iterator[Entry]:
        """Yield the entries after a number."""
        # Entries are in order, so the first key is the oldest one.
        first = max(number + 1, next(iter(self._entries), self.last + 1))
        # Numbers have gaps where progress lines were dropped.
        return (self._entries[at] for at in range(first, self.last + 1) if at in self._entries)


@dataclass(slots=True)
class Reader:
    """A page that reads the stream, and the number of the last entry that it got."""

    seen: int
    updated: asyncio.Event = field(default_factory=asyncio.Event)


class EventStream(ABC):
    """Server-sent events for the connected pages. Abstract: `_feed` sends the events."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._readers: list[Reader] = []
        self._is_closed = False

    def close(self) -> None:
        """Send every page the event that asks it to disconnect and not to reconnect."""
        self._is_closed = True
        self._notify_readers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page until it disconnects."""
        if len(self._readers) >= self._limits.num_streams or self._is_closed:
            text = f"There are already {len(self._readers)} streams. Close a tab."
            await Answer(HTTPStatus.SERVICE_UNAVAILABLE, "streams", text).send(send)
            return
        # A browser sends this header automatically when it reconnects.
        last_event_id = next((value for name, value in scope["headers"] if name.lower() == b"last-event-id"), b"")
        # The second header asks a proxy, such as nginx, not to buffer events.
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        reader = Reader(self._number(last_event_id))
        self._readers.append(reader)
        try:
            await until_first(until_disconnected(receive), self._feed(reader, send))
        finally:
            self._readers.remove(reader)

    @abstractmethod
    async def _feed(self, reader: Reader, send: Send) -> None:
        """Send existing events to a page, and then new ones, until the stream is closed."""

    def _number(self, _last_event_id: bytes, /) -> int:
        """Return the position at which a page starts to read."""
        return 0

    async def _wait(self, reader: Reader, send: Send) -> None:
        """Wait for new events, or until the connection has been silent for too long."""
        try:
            async with asyncio.timeout(self._limits.heartbeat_seconds):
                await reader.updated.wait()
        except TimeoutError:
            # A comment, which readers ignore, keeps a silent connection open.
            await send_text(send, ": beat\n\n")

    def _notify_readers(self) -> None:
        for reader in self._readers:
            reader.updated.set()


class Stream(EventStream):
    """The stream of lines and events that pages read."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__(limits)
        self._clock = clock
        self._ring = Ring(limits)
        # A part of every id, so that a page does not continue at a number of a previous server.
        self._name = secrets.token_hex(4)
        self._status = "{}"
        self._unwatched_since = clock()

    @property
    def status(self) -> str:
        """The latest status, as JSON."""
        return self._status

    @property
    def unwatched_seconds(self) -> float:
        """Seconds without a connected page; 0 while there is one."""
        return 0.0 if self._readers else self._clock() - self._unwatched_since

    def begin(self) -> None:
        """Drop the previous run's entries before a new run starts, and restart the time without a page."""
        self._ring.clear()
        self._unwatched_since = self._clock()

    def publish(self, event: str, data: Mapping[str, Any], run: str | None = None) -> None:
        """Send an event to every page."""
        text = _json(data)
        if event == "status":
            self._status = text
        self._ring.add(event, run, text)
        self._notify_readers()

    def publish_line(self, run: str, line: StreamLine) -> bool:
        """Send a line of a run; return False if it is too long to send."""
        text = _json(line)
        if len(text) > self._limits.line_bytes:
            return False
        self._ring.add("lines", run, text, is_progress=line["kind"] not in ESSENTIAL_KINDS)
        self._notify_readers()
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page until it disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._unwatched_since = self._clock()

    async def _feed(self, reader: Reader, send: Send) -> None:
        """Send existing entries, and then new ones, within the message rate."""
        first_status = self._ring.last  # entries up to here are older than the status sent first
        await send_text(send, message("status", self._status))
        while True:
            # Clear before reading, so that new entries set it again.
            reader.updated.clear()
            text, has_lines = self._next(reader, first_status)
            if text:
                await send_text(send, text)
                await asyncio.sleep(has_lines / self._limits.messages_per_second)
            elif self._is_closed:
                await send({"type": "http.response.body", "body": message("close", "{}").encode()})
                return
            else:
                await self._wait(reader, send)

    def _next(self, reader: Reader, first_status: int) -> tuple[str, bool]:
        """Return the next messages for a reader, and whether the last of them contains lines."""
        has_backlog = self._ring.last - reader.seen > self._limits.max_backlog_lines
        lines: list[str] = []
        texts: list[str] = []
        num_bytes = num_dropped = 0
        run: str | None = None
        for entry in self._ring.after(reader.seen):
            # To keep the order, send the lines before this event first.
            if entry.event != "lines" and lines:
                break
            reader.seen = entry.number
            if entry.event == "lines" and has_backlog and entry.is_progress:
                num_dropped += 1
            elif entry.event == "lines":
                run = entry.run
                lines.append(entry.text)
                num_bytes += len(entry.text)
            elif entry.event != "status" or entry.number > first_status:
                texts.append(message(entry.event, entry.text, self._id(entry.number)))
            if num_bytes > self._limits.message_bytes:
                break
        if lines:
            # Join as text, because the lines are already JSON.
            data = f'{{"run":{json.dumps(run)},"dropped":{num_dropped},"lines":[{",".join(lines)}]}}'
            texts.append(message("lines", data, self._id(reader.seen)))
        return "".join(texts), bool(lines)

    def _id(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _number(self, last_event_id: bytes, /) -> int:
        """Return the position of a reconnecting page; 0 for a page that is new to this server."""
        name, _, number = last_event_id.decode("latin-1").partition("-")
        is_known = name == self._name and number.isdecimal() and len(number) <= _MAX_DIGITS
        return min(int(number), self._ring.last) if is_known else 0


async def until_first(*awaitables: Awaitable[None]) -> None:
    """Wait until an awaitable ends, and cancel all others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # Wait for cancelled tasks, so that none continues in the background.
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_text(send: Send, text: str) -> None:
    """Send a part of a response that continues."""
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def message(event: str, data: str, number: str | None = None) -> str:
    """Return a server-sent event; `data` is JSON without line breaks."""
    head = f"event: {event}\n" if number is None else f"event: {event}\nid: {number}\n"
    return f"{head}data: {data}\n\n"


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
