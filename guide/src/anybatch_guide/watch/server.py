"""The server of `anybatch watch`: the built page, and one event stream of the runs. Only notes are written."""

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from anybatch_guide.export import Asset
from anybatch_guide.guard import Admission, App, Guard, Send
from anybatch_guide.limits import Limits
from anybatch_guide.local_server import ServerAddress, serve_app
from anybatch_guide.server import http_error_response, serve_files
from anybatch_guide.stream import EventStream, Reader, message, send_text
from anybatch_guide.watch.watching import WatchedRuns, encoded

LOOK_SECONDS: Final = 0.5
"""Interval of log checks once everything is read, and of updates for a page."""


class RunViews(EventStream):
    """The current data of all runs, streamed to every page; a new page first gets all data."""

    def __init__(self, watched: WatchedRuns, limits: Limits) -> None:
        super().__init__(limits)
        self._watched = watched
        self._views: dict[int, tuple[int, str]] = {}
        self._number_of_updates = 0
        self.failure: Exception | None = None

    async def save_note(self, request: Request) -> JSONResponse:
        """Save the title and note of a run: `{"at": index, "title": text, "note": text}`."""
        try:
            fields = json.loads(await request.body())
            at, title, note = fields["at"], fields["title"], fields["note"]
        except (ValueError, RecursionError, KeyError, TypeError):
            at, title, note = None, None, None
        has_run = type(at) is int and 0 <= at < len(self._watched.runs)
        if not has_run or not isinstance(title, str) or not isinstance(note, str):
            return JSONResponse({"message": "The body must have a run, a title and a note."}, 422)
        try:
            await asyncio.to_thread(self._watched.runs[at].save_note, title, note)
        except OSError as error:
            return JSONResponse({"message": f"The note cannot be saved: {error.strerror}."}, 409)
        return JSONResponse({})

    async def keep_reading(self) -> None:
        """Read the logs in a thread, so that requests are still answered; ends when cancelled.

        An error ends the server like Ctrl-C, because a frozen page would look like a stalled run.
        """
        try:
            while True:
                for run, view in (await asyncio.to_thread(self._watched.read_changes)).items():
                    self._number_of_updates += 1
                    self._views[run] = (self._number_of_updates, view)
                self._notify_readers()
                await asyncio.sleep(0 if self._watched.has_unread_bytes else LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 (raised again when the server has ended)
            self.failure = error
            signal.raise_signal(signal.SIGINT)

    async def _feed(self, reader: Reader, send: Send) -> None:
        """Send each updated view; skip intermediate versions."""
        num_runs = 0
        while True:
            # Clear before reading, so that new data sets it again.
            reader.updated.clear()
            if self._is_closed:
                await send({"type": "http.response.body", "body": message("close", "{}").encode()})
                return
            if num_runs != len(self._watched.runs):
                num_runs = len(self._watched.runs)
                await send_text(send, message("runs", encoded({"num_runs": num_runs})))
            newer = {run: view for run, (number, view) in self._views.items() if number > reader.seen}
            reader.seen = self._number_of_updates
            for run, view in newer.items():
                await send_text(send, message("run", f'{{"at":{run},"run":{view}}}'))
            if newer:  # batch updates that arrive together
                await asyncio.sleep(LOOK_SECONDS)
            await self._wait(reader, send)


def make_app(page: Mapping[str, Asset], views: RunViews, admission: Admission, limits: Limits) -> App:
    """Return the complete application: guard, page, stream, and a reader with the lifetime of the server."""

    @contextlib.asynccontextmanager
    async def reading(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(views.keep_reading())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    routes = [
        Route("/api/watch", views, methods=["GET"]),
        Route("/api/note", views.save_note, methods=["POST"]),
        # Last, because it matches every path.
        Route("/{path:path}", serve_files(page), methods=["GET"]),
    ]
    errors: dict[Any, Any] = {HTTPException: http_error_response}
    app = Starlette(routes=routes, lifespan=reading, exception_handlers=errors)
    # Starlette would build redirect addresses from the Host header.
    app.router.redirect_slashes = False
    return Guard(app, admission, limits)


async def serve(
    page: Mapping[str, Asset], runs: WatchedRuns, address: ServerAddress, on_listening: Callable[[str, str], None]
) -> None:
    """Serve the page until the process receives SIGINT or SIGTERM."""
    views = RunViews(runs, address.limits)
    try:
        await serve_app(
            lambda admission: make_app(page, views, admission, address.limits), address, views.close, on_listening
        )
    finally:
        if views.failure is not None:
            raise views.failure
