"""The guide's server: the built page, its recordings, one stream of events, and one run at a time.

A request passes the guard, and then one of these routes; what a run is given is a name and numbers within limits.
Nothing here imports torch: that is the worker's.
"""

import asyncio
import contextlib
import json
import math
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from anybatch.errors import UserError
from anybatch_guide.built import DIST, Asset, read_page, with_transport
from anybatch_guide.guard import LOOPBACK_NAMES, Admission, App, Guard
from anybatch_guide.limits import Limits
from anybatch_guide.runs import Failure, RefusedError, Runs
from anybatch_guide.stream import Stream
from anybatch_guide.worker_process import COMMAND

Handler = Callable[[Request], Awaitable[Response]]
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_SETTINGS: Final = 32
_MAX_WORD: Final = 64
_EXIT_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The page that is served, the address, and the limits.

    Attributes:
        page: folder of the built page.
        host: address to listen at.
        port: to listen at; 0 for one that is free.
        names: by which the server may be asked, besides those of loopback.
        keep: whether a run goes on that no page watches.
        limits: of requests, streams and runs.
        worker: command that starts the process that computes.
    """

    page: Path = DIST
    host: str = "127.0.0.1"
    port: int = 0
    names: frozenset[str] = frozenset()
    keep: bool = False
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    worker: Sequence[str] = COMMAND


def make_app(page: Mapping[str, Asset], runs: Runs, stream: Stream, admission: Admission, limits: Limits) -> App:
    """Return the whole application: guard, routes, and a worker that lives as long as the server does."""

    @contextlib.asynccontextmanager
    async def worker(_app: Starlette) -> AsyncIterator[None]:
        runs.open()
        try:
            yield
        finally:
            await runs.close()

    routes = [
        Route("/api/state", _state(runs, stream), methods=["GET"]),
        Route("/api/events", stream, methods=["GET"]),
        Route("/api/runs", _begin(runs), methods=["POST"]),
        Route("/api/runs/{run_id}", _cancel(runs), methods=["DELETE"]),
        Route("/api/runs/{run_id}/{do}", _steer(runs), methods=["POST"]),
        # Last, since it matches every path.
        Route("/{path:path}", _files(page), methods=["GET"]),
    ]
    errors: dict[Any, Any] = {HTTPException: _http_error, RefusedError: _refused}
    app = Starlette(routes=routes, lifespan=worker, exception_handlers=errors)
    # Starlette would make the address of a redirect from the Host header.
    app.router.redirect_slashes = False
    return Guard(app, admission, limits)


def _files(page: Mapping[str, Asset]) -> Handler:
    """Serve the files of the page; a path is looked up in a list and never joined to a folder."""
    html = with_transport(page["index.html"].content.decode(), "live").encode()
    files = {**page, "index.html": Asset(html, page["index.html"].media_type)}

    async def serve_file(request: Request) -> Response:
        asset = files.get(request.path_params["path"] or "index.html")
        if asset is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is nothing here.")
        return Response(asset.content, media_type=asset.media_type)

    return serve_file


def _state(runs: Runs, stream: Stream) -> Handler:
    async def state(_request: Request) -> Response:
        return JSONResponse({**json.loads(stream.status), "made": runs.made})

    return state


def _begin(runs: Runs) -> Handler:
    async def begin(request: Request) -> Response:
        asked = asked_run(await request.body())
        paused = asked.pop("paused", False)
        return JSONResponse({"id": await runs.begin(asked, paused=paused)}, HTTPStatus.ACCEPTED)

    return begin


def _steer(runs: Runs) -> Handler:
    async def steer(request: Request) -> Response:
        do = request.path_params["do"]
        if do not in ("pause", "resume", "micro"):
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is nothing here.")
        _nothing(await request.body())
        runs.steer(request.path_params["run_id"], do)
        return JSONResponse({"id": request.path_params["run_id"]}, HTTPStatus.ACCEPTED)

    return steer


def _cancel(runs: Runs) -> Handler:
    async def cancel(request: Request) -> Response:
        _nothing(await request.body())
        runs.cancel(request.path_params["run_id"])
        return JSONResponse({"id": request.path_params["run_id"]}, HTTPStatus.ACCEPTED)

    return cancel


def asked_run(body: bytes) -> dict[str, Any]:
    """Return what a POST asks for: kind, name or setting, and perhaps paused. The worker looks at it more closely.

    Raises:
        RefusedError: it is anything else.
    """
    asked = _object(body)
    fault = _fault(asked)
    if fault is not None:
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", fault))
    return asked


def _fault(asked: Mapping[str, Any]) -> str | None:
    """Return what is wrong with what is asked for, as far as its form tells."""
    kind = asked.get("kind")
    subject = {"playground": "setting", "experiment": "name"}.get(kind if isinstance(kind, str) else "")
    if subject is None or not {"kind", subject} <= asked.keys() <= {"kind", subject, "paused"}:
        return 'Wanted: {"kind": "playground", "setting": {...}} or {"kind": "experiment", "name": ...}.'
    if type(asked.get("paused", False)) is not bool:
        return "paused is true or false."
    if subject == "name" and not (isinstance(asked["name"], str) and _NAME.fullmatch(asked["name"])):
        return "The name of an experiment is lower-case letters, digits and underscores."
    if subject == "setting" and not _is_flat(asked["setting"]):
        return "A setting is an object of words and numbers."
    return None


def _is_flat(setting: object) -> bool:
    if not isinstance(setting, dict) or len(setting) > _MAX_SETTINGS:
        return False
    return all(
        isinstance(value, bool | int)
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, str) and len(value) <= _MAX_WORD)
        for value in setting.values()
    )


def _nothing(body: bytes) -> None:
    """Refuse a body that says something where nothing is asked."""
    if body and _object(body):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "Nothing is expected in the body."))


def _object(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object: no constants that JSON lacks, no name twice."""

    def no_constant(name: str) -> float:
        raise ValueError(name)

    def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Parsers disagree on which of two equal names counts.
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(pairs)
        return dict(pairs)

    try:
        value = json.loads(body, parse_constant=no_constant, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "The body has to be a JSON object."))
    return value


async def _refused(_request: Request, error: RefusedError) -> Response:
    failure = {"code": error.failure.code, "message": error.failure.message}
    return JSONResponse(failure if error.run is None else {**failure, "id": error.run}, error.status)


async def _http_error(_request: Request, error: HTTPException) -> Response:
    word = HTTPStatus(error.status_code).name.lower()
    return JSONResponse({"code": word, "message": error.detail}, error.status_code, headers=error.headers)


async def serve(serving: Serving, on_listening: Callable[[str, str], None]) -> None:
    """Serve the guide until the process is asked to end (SIGINT, SIGTERM).

    Args:
        serving: what, to whom.
        on_listening: called once it listens, with the address to show, and one that admits a single browser, once.

    Raises:
        UserError: there is no page, or the address cannot be listened at.
    """
    page = read_page(serving.page)
    sockets = _listen(serving)
    # Read from the socket, since port 0 asks for any that is free.
    port = sockets[0].getsockname()[1]
    names = LOOPBACK_NAMES | serving.names | ({serving.host} - {"0.0.0.0", "::"})  # noqa: S104 (taken out, not bound)
    admission = Admission(port=port, hosts=names, once=secrets.token_urlsafe())
    stream = Stream(serving.limits, time.monotonic)
    runs = Runs(stream, serving.limits, time.monotonic, command=serving.worker, keep=serving.keep)
    app = make_app(page, runs, stream, admission, serving.limits)
    server = uvicorn.Server(_config(app, serving.limits))
    shown = f"[{serving.host}]" if ":" in serving.host else serving.host
    on_listening(f"http://{shown}:{port}/?k={admission.secret}", f"http://{shown}:{port}/?k={admission.once}")
    ending = asyncio.create_task(_close_when(server, stream))
    try:
        await server.serve(sockets=sockets)
    finally:
        # A server that fails by itself leaves this task waiting for a signal.
        ending.cancel()


async def _close_when(server: uvicorn.Server, stream: Stream) -> None:
    """Close the stream once the server wants to end: it waits for its responses, and a stream has no end."""
    while not server.should_exit:  # noqa: ASYNC110 (set by a signal handler of the server, which looks as often itself)
        await asyncio.sleep(_EXIT_SECONDS)
    stream.close()


def _config(app: App, limits: Limits) -> uvicorn.Config:
    """Return how uvicorn serves: HTTP/1.1 only, no word about itself, and no line about any request."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        # No proxy is expected in front, so such headers would only be a client's claims.
        proxy_headers=False,
        limit_concurrency=limits.num_connections,
        timeout_graceful_shutdown=5,
        # Bounds the headers of a request, which the guard sees only when they are complete.
        h11_max_incomplete_event_size=16 * 2**10,
    )


def _listen(serving: Serving) -> list[socket.socket]:
    """Return what listens: at 127.0.0.1 also at ::1, so that no other program can be localhost on this port."""
    family = socket.AF_INET6 if ":" in serving.host else socket.AF_INET
    try:
        sockets = [socket.create_server((serving.host, serving.port), family=family)]
    except OSError as error:
        message = (
            f"nothing can listen at {serving.host}, port {serving.port}: {error.strerror}. "
            "Name another --port, or leave it out for one that is free."
        )
        raise UserError(message) from error
    if serving.host == "127.0.0.1":
        with contextlib.suppress(OSError):  # a machine without IPv6
            sockets.append(socket.create_server(("::1", sockets[0].getsockname()[1]), family=socket.AF_INET6))
    return sockets
