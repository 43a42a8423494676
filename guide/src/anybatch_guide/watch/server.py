"""The server of `anybatch watch`: the built page, and one event stream of the runs. It is read-only."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from anybatch_guide.door import Door, serve_app
from anybatch_guide.export import Asset
from anybatch_guide.guard import Admission, Answer, App, Guard, Receive, Scope, Send
from anybatch_guide.limits import Limits
from anybatch_guide.server import serve_files, tell_http_error
from anybatch_guide.stream import gone, message, send_text, until_first
from anybatch_guide.watch.watching import Watching, encoded

LOOK_SECONDS: Final = 0.5
"""Interval of log checks after everything is read, and of updates of a run."""


class Shown:
    """The current data of the runs, and the streams; a new page first gets all data."""

    def __init__(self, watching: Watching, limits: Limits) -> None:
        self._watching = watching
        self._limits = limits
        self._views: dict[int, tuple[int, str]] = {}
        self._number = 0
        self._readers: set[asyncio.Event] = set()
        self._is_closed = False
        self.failure: Exception | None = None

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self._wake()

    async def keep_looking(self) -> None:
        """Read the logs in a thread, so that requests are still answered; ends when cancelled.

        Errors end the server like Ctrl-C, because a frozen page must not look like a stalled run.
        """
        try:
            while True:
                for run, view in (await asyncio.to_thread(self._watching.look)).items():
                    self._number += 1
                    self._views[run] = (self._number, view)
                self._wake()
                await asyncio.sleep(0 if self._watching.has_unread_bytes else LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 (raised again when the server has ended)
            self.failure = error
            signal.raise_signal(signal.SIGINT)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one page until it disconnects."""
        if len(self._readers) >= self._limits.num_streams or self._is_closed:
            words = f"There are already {len(self._readers)} streams. Close a tab."
            await Answer(HTTPStatus.SERVICE_UNAVAILABLE, "streams", words).send(send)
            return
        # The second header asks a proxy, such as nginx, not to buffer events.
        headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        news = asyncio.Event()
        self._readers.add(news)
        try:
            await until_first(gone(receive), self._feed(news, send))
        finally:
            self._readers.remove(news)

    async def _feed(self, news: asyncio.Event, send: Send) -> None:
        """Send each updated view; skip intermediate versions."""
        seen = 0
        await send_text(send, message("runs", encoded({"num_runs": len(self._watching.runs)})))
        while True:
            # Clear before reading, so that new data sets it again.
            news.clear()
            if self._is_closed:
                await send({"type": "http.response.body", "body": message("close", "{}").encode()})
                return
            newer = {run: view for run, (number, view) in self._views.items() if number > seen}
            seen = self._number
            for run, view in newer.items():
                await send_text(send, message("run", f'{{"at":{run},"run":{view}}}'))
            if newer:  # batch updates that arrive together
                await asyncio.sleep(LOOK_SECONDS)
            await self._wait(news, send)

    async def _wait(self, news: asyncio.Event, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.heartbeat_seconds):
                await news.wait()
        except TimeoutError:
            # A comment, which readers ignore, keeps a silent connection open.
            await send_text(send, ": beat\n\n")

    def _wake(self) -> None:
        for news in self._readers:
            news.set()


def make_app(page: Mapping[str, Asset], shown: Shown, admission: Admission, limits: Limits) -> App:
    """Return the complete application: guard, page, stream, and a reader with the lifetime of the server."""

    @contextlib.asynccontextmanager
    async def reading(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(shown.keep_looking())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    routes = [
        Route("/api/watch", shown, methods=["GET"]),
        # Last, because it matches every path.
        Route("/{path:path}", serve_files(page), methods=["GET"]),
    ]
    errors: dict[Any, Any] = {HTTPException: tell_http_error}
    app = Starlette(routes=routes, lifespan=reading, exception_handlers=errors)
    # Starlette would build redirect addresses from the Host header.
    app.router.redirect_slashes = False
    return Guard(app, admission, limits)


async def serve(
    page: Mapping[str, Asset], watching: Watching, door: Door, on_listening: Callable[[str, str], None]
) -> None:
    """Serve the page until the process receives SIGINT or SIGTERM."""
    shown = Shown(watching, door.limits)
    try:
        await serve_app(
            lambda admission: make_app(page, shown, admission, door.limits), door, shown.close, on_listening
        )
    finally:
        if shown.failure is not None:
            raise shown.failure
