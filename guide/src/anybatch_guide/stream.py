"""Stream the lines of one run to many pages: lines are kept in a ring, and every page reads at its own speed.

A stream is server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html). Every message with
lines has an id; a page that reconnects sends the last id it saw, and continues after it. The only state per reader
is its position: a slow reader with a large backlog gets no progress lines. All readers get the
essential lines (start, step, diagnosis, end and similar).
"""

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from anybatch_guide.guard import Answer, Receive, Scope, Send
from anybatch_guide.limits import Limits

StreamLine = Mapping[str, Any]
FIRM_KINDS: Final = frozenset({
    "start", "step", "diagnosis", "evaluate", "checkpoint", "out_of_memory", "end", "guide.match"
})  # fmt: skip

_MAX_DIGITS: Final = 15


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the stream: a line of a run, or another event."""

    number: int  # its index among all entries of this server
    event: str  # "lines" for a line, else the event
    run: str | None  # its run; None for a status
    text: str  # its JSON text
    light: bool  # whether it only shows progress


class RingFullError(Exception):
    """A run wrote more essential lines than can be kept."""


class Ring:
    """The lines of the latest run, in order; the oldest progress lines are dropped first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._entries: dict[int, Entry] = {}
        self._light: deque[int] = deque()
        self._num_bytes = 0
        self.last = 0

    def clear(self) -> None:
        """Drop all entries, but keep counting numbers."""
        self._entries.clear()
        self._light.clear()
        self._num_bytes = 0

    def add(self, event: str, run: str | None, text: str, *, light: bool = False) -> None:
        """Add an entry."""
        self.last += 1
        self._entries[self.last] = Entry(self.last, event, run, text, light)
        self._num_bytes += len(text)
        if light:
            self._light.append(self.last)
        while len(self._entries) > self._limits.ring_lines or self._num_bytes > self._limits.ring_bytes:
            if not self._light:
                # Events other than lines are few and small, and do not count towards the limit.
                if event == "lines":
                    raise RingFullError
                return
            self._num_bytes -= len(self._entries.pop(self._light.popleft()).text)

    def behind(self, number: int) -> Iterator[Entry]:
        """Yield the remaining entries after a number."""
        # Entries are in order, so the first key is the oldest one.
        first = max(number + 1, next(iter(self._entries), self.last + 1))
        # Numbers have gaps where progress lines were dropped.
        return (self._entries[at] for at in range(first, self.last + 1) if at in self._entries)


@dataclass(slots=True)
class Reader:
    """One page and its position."""

    seen: int
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Stream:
    """The stream of lines and events that pages read."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._ring = Ring(limits)
        self._readers: list[Reader] = []
        # Part of every id: after a restart, a page must not continue at a number of the previous server.
        self._name = secrets.token_hex(4)
        self._status = "{}"
        self._is_closed = False
        self._alone_since = clock()

    @property
    def status(self) -> str:
        """The latest status, as JSON."""
        return self._status

    @property
    def alone_seconds(self) -> float:
        """Seconds without a connected page; 0 while there is one."""
        return 0.0 if self._readers else self._clock() - self._alone_since

    def begin(self) -> None:
        """Drop the previous run: a new one starts, and its page is connected."""
        self._ring.clear()
        self._alone_since = self._clock()

    def publish(self, event: str, data: Mapping[str, Any], run: str | None = None) -> None:
        """Send an event to every page."""
        text = _json(data)
        if event == "status":
            self._status = text
        self._ring.add(event, run, text)
        self._wake()

    def publish_line(self, run: str, line: StreamLine) -> bool:
        """Send a line of a run; return False if it is too long to send."""
        text = _json(line)
        if len(text) > self._limits.line_bytes:
            return False
        self._ring.add("lines", run, text, light=line["kind"] not in FIRM_KINDS)
        self._wake()
        return True

    def close(self) -> None:
        """Send every page the event that asks it to disconnect and not to reconnect."""
        self._is_closed = True
        self._wake()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page until it disconnects."""
        if len(self._readers) >= self._limits.num_streams or self._is_closed:
            text = f"There are already {len(self._readers)} streams. Close a tab."
            await Answer(HTTPStatus.SERVICE_UNAVAILABLE, "streams", text).send(send)
            return
        # A browser sends this header automatically when it reconnects.
        asked = next((value for name, value in scope["headers"] if name.lower() == b"last-event-id"), b"")
        # The second header asks a proxy, such as nginx, not to buffer events.
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        with self._reader(self._number(asked)) as reader:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
                return
            await until_first(gone(receive), self._feed(reader, send))

    async def _feed(self, reader: Reader, send: Send) -> None:
        """Send existing entries, and then new ones, within the message rate."""
        first_status = self._ring.last  # entries up to here are older than the status sent first
        await send_text(send, message("status", self._status))
        while True:
            # Clear before reading, so that new entries set it again.
            reader.news.clear()
            text, has_lines = self._next(reader, first_status)
            if text:
                await send_text(send, text)
                await asyncio.sleep(has_lines / self._limits.messages_per_second)
            elif self._is_closed:
                await send({"type": "http.response.body", "body": message("close", "{}").encode()})
                return
            else:
                await self._wait(reader, send)

    async def _wait(self, reader: Reader, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.heartbeat_seconds):
                await reader.news.wait()
        except TimeoutError:
            # A comment, which readers ignore, keeps a silent connection open.
            await send_text(send, ": beat\n\n")

    def _next(self, reader: Reader, first_status: int) -> tuple[str, bool]:
        """Return the next messages for a reader, and whether the last of them contains lines."""
        far_behind = self._ring.last - reader.seen > self._limits.behind_lines
        lines: list[str] = []
        texts: list[str] = []
        num_bytes = num_dropped = 0
        run: str | None = None
        for entry in self._ring.behind(reader.seen):
            # Send the lines so far first, to keep the order.
            if entry.event != "lines" and lines:
                break
            reader.seen = entry.number
            if entry.event == "lines" and far_behind and entry.light:
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

    def _number(self, asked: bytes) -> int:
        """Return the position of a reconnecting page; 0 for a page that is new to this server."""
        name, _, number = asked.decode("latin-1").partition("-")
        is_known = name == self._name and number.isdecimal() and len(number) <= _MAX_DIGITS
        return min(int(number), self._ring.last) if is_known else 0

    @contextmanager
    def _reader(self, seen: int) -> Iterator[Reader]:
        reader = Reader(seen)
        self._readers.append(reader)
        try:
            yield reader
        finally:
            self._readers.remove(reader)
            self._alone_since = self._clock()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.news.set()


async def until_first(*ways: Awaitable[None]) -> None:
    """Wait until one of them ends, and end the others."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # Wait for cancelled tasks, so that none continues in the background.
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_text(send: Send, text: str) -> None:
    """Send a part of an unfinished response."""
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


def message(event: str, data: str, number: str | None = None) -> str:
    """Return a server-sent event; the JSON has no line breaks."""
    head = f"event: {event}\n" if number is None else f"event: {event}\nid: {number}\n"
    return f"{head}data: {data}\n\n"


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
