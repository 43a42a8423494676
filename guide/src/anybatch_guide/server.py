"""The server of the guide: the built page, its recordings, one event stream, and one run at a time.

A request passes the guard, and then one of these routes. The input of a run is a name and numbers within limits.
This module does not import torch; only the worker does.
"""

import contextlib
import gzip
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from anybatch_guide.door import Door, serve_app
from anybatch_guide.export import DIST, Asset, read_page, with_transport
from anybatch_guide.guard import Admission, App, Guard
from anybatch_guide.limits import Limits
from anybatch_guide.runs import Failure, RefusedError, Runs
from anybatch_guide.stream import Stream
from anybatch_guide.worker_process import COMMAND

Handler = Callable[[Request], Awaitable[Response]]
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_WEIGHS_NOTHING: Final = re.compile(r"q=0(\.0*)?")
_MAX_SETTINGS: Final = 32
_MAX_WORD: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The served page, the address, and the limits."""

    page: Path = DIST  # folder of the built page
    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # port to listen on; 0 for any free port
    names: frozenset[str] = frozenset()  # accepted host names, in addition to loopback names
    keep: bool = False  # whether a run continues without a watching page
    limits: Limits = Limits()  # noqa: RUF009 (frozen)
    worker: Sequence[str] = COMMAND  # command that starts the worker process


def make_app(page: Mapping[str, Asset], runs: Runs, stream: Stream, admission: Admission, limits: Limits) -> App:
    """Return the complete application: guard, routes, and a worker with the lifetime of the server."""

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
        # Last, because it matches every path.
        Route("/{path:path}", serve_files(page), methods=["GET"]),
    ]
    errors: dict[Any, Any] = {HTTPException: tell_http_error, RefusedError: _refused}
    app = Starlette(routes=routes, lifespan=worker, exception_handlers=errors)
    # Starlette would build redirect addresses from the Host header.
    app.router.redirect_slashes = False
    return Guard(app, admission, limits)


def serve_files(page: Mapping[str, Asset]) -> Handler:
    """Serve the files of the page, with compressed text; paths are looked up in a dict, never joined to a folder."""
    html = with_transport(page["index.html"].content.decode(), "live").encode()
    files = {**page, "index.html": Asset(html, page["index.html"].media_type)}
    compressed: dict[str, bytes] = {}  # filled on demand

    async def serve_file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        asset = files.get(path)
        if asset is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "Not found.")
        headers = {"vary": "accept-encoding"}
        if not asset.is_text or not _takes_gzip(request.headers.get("accept-encoding", "")):
            return Response(asset.content, media_type=asset.media_type, headers=headers)
        if path not in compressed:
            compressed[path] = gzip.compress(asset.content, mtime=0)
        return Response(compressed[path], media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})

    return serve_file


def _takes_gzip(accepted: str) -> bool:
    """Return whether a header Accept-Encoding names gzip with a weight other than 0 (RFC 9110, 12.5.3)."""
    words = [word.lower().replace(" ", "").partition(";") for word in accepted.split(",")]
    return any(name == "gzip" and not _WEIGHS_NOTHING.fullmatch(weight) for name, _, weight in words)


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
            raise HTTPException(HTTPStatus.NOT_FOUND, "Not found.")
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
    """Return the request of a POST: kind, name or setting, and optionally paused. The worker validates the details."""
    asked = _object(body)
    fault = _fault(asked)
    if fault is not None:
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", fault))
    return asked


def _fault(asked: Mapping[str, Any]) -> str | None:
    """Return the error in the form of a request, or an empty text."""
    kind = asked.get("kind")
    subject = {"playground": "setting", "experiment": "name"}.get(kind if isinstance(kind, str) else "")
    if subject is None or not {"kind", subject} <= asked.keys() <= {"kind", subject, "paused"}:
        return 'Expected: {"kind": "playground", "setting": {...}} or {"kind": "experiment", "name": ...}.'
    if type(asked.get("paused", False)) is not bool:
        return "paused must be true or false."
    if subject == "name" and not (isinstance(asked["name"], str) and _NAME.fullmatch(asked["name"])):
        return "The name of an experiment has lower-case letters, digits and underscores."
    if subject == "setting" and not _is_flat(asked["setting"]):
        return "A setting must be an object of strings and numbers."
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
    """Refuse a body that is not empty."""
    if body and _object(body):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "The body must be empty."))


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; refuse NaN, infinities and duplicate keys."""

    def no_constant(name: str) -> float:
        raise ValueError(name)

    def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Parsers differ in which of two duplicate keys counts.
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(pairs)
        return dict(pairs)

    try:
        value = json.loads(body, parse_constant=no_constant, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "The body must be a JSON object."))
    return value


async def _refused(_request: Request, error: RefusedError) -> Response:
    failure = {"code": error.failure.code, "message": error.failure.message}
    return JSONResponse(failure if error.run is None else {**failure, "id": error.run}, error.status)


async def tell_http_error(_request: Request, error: HTTPException) -> Response:
    """Return an HTTP error as JSON."""
    word = HTTPStatus(error.status_code).name.lower()
    return JSONResponse({"code": word, "message": error.detail}, error.status_code, headers=error.headers)


async def serve(serving: Serving, on_listening: Callable[[str, str], None]) -> None:
    """Serve the guide until the process receives SIGINT or SIGTERM."""
    page = read_page(serving.page)
    stream = Stream(serving.limits, time.monotonic)
    runs = Runs(stream, serving.limits, time.monotonic, command=serving.worker, keep=serving.keep)
    door = Door(host=serving.host, port=serving.port, names=serving.names, limits=serving.limits)

    def app_for(admission: Admission) -> App:
        return make_app(page, runs, stream, admission, serving.limits)

    await serve_app(app_for, door, stream.close, on_listening)
