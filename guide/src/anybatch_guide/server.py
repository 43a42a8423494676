"""The server of the guide: the built page, its recordings, one event stream, and one run at a time.

A request passes the guard, and then reaches a route of this module. A run request has only a name and limited numbers.
This module does not import torch; only the worker does.
"""

import contextlib
import gzip
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from anybatch_guide.export import Asset, read_page, with_mode
from anybatch_guide.guard import Admission, App, Guard
from anybatch_guide.limits import Limits
from anybatch_guide.local_server import ServerAddress, serve_app
from anybatch_guide.runs import Failure, RefusedError, Runs
from anybatch_guide.stream import Stream
from anybatch_guide.worker_process import COMMAND

Handler = Callable[[Request], Awaitable[Response]]
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_ZERO_WEIGHT: Final = re.compile(r"q=0(\.0*)?")
_MAX_SETTINGS: Final = 32
_MAX_TEXT: Final = 64


def make_app(page: Mapping[str, Asset], runs: Runs, stream: Stream, limits: Limits, admission: Admission) -> App:
    """Return the complete application: guard, routes, and a worker with the lifetime of the server."""

    @contextlib.asynccontextmanager
    async def worker(_app: Starlette) -> AsyncIterator[None]:
        runs.open()
        try:
            yield
        finally:
            await runs.close()

    routes = [
        Route("/api/state", partial(_state, runs, stream), methods=["GET"]),
        Route("/api/events", stream, methods=["GET"]),
        Route("/api/runs", partial(_begin, runs), methods=["POST"]),
        Route("/api/runs/{run_id}", partial(_steer, runs), methods=["DELETE"]),
        Route("/api/runs/{run_id}/{do}", partial(_steer, runs), methods=["POST"]),
        # Last, because it matches every path.
        Route("/{path:path}", serve_files(page), methods=["GET"]),
    ]
    errors: dict[Any, Any] = {HTTPException: http_error_response, RefusedError: _refusal_response}
    app = Starlette(routes=routes, lifespan=worker, exception_handlers=errors)
    # Starlette would build redirect addresses from the Host header.
    app.router.redirect_slashes = False
    return Guard(app, admission, limits)


def serve_files(page: Mapping[str, Asset]) -> Handler:
    """Return a handler for the page's files, with compressed text; paths are looked up in a dict, never on the disk."""
    html = with_mode(page["index.html"].content.decode(), "live").encode()
    files = {**page, "index.html": Asset(html, page["index.html"].media_type)}
    compressed: dict[str, bytes] = {}  # filled on demand

    async def serve_file(request: Request) -> Response:
        path = request.path_params["path"] or "index.html"
        asset = files.get(path)
        if asset is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, "Not found.")
        headers = {"vary": "accept-encoding"}
        if not asset.is_text or not _accepts_gzip(request.headers.get("accept-encoding", "")):
            return Response(asset.content, media_type=asset.media_type, headers=headers)
        if path not in compressed:
            compressed[path] = gzip.compress(asset.content, mtime=0)
        return Response(compressed[path], media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})

    return serve_file


def _accepts_gzip(accepted: str) -> bool:
    """Return whether a header Accept-Encoding names gzip with a weight other than 0 (RFC 9110, 12.5.3)."""
    encodings = [code.lower().replace(" ", "").partition(";") for code in accepted.split(",")]
    return any(name == "gzip" and not _ZERO_WEIGHT.fullmatch(weight) for name, _, weight in encodings)


async def _state(runs: Runs, stream: Stream, _request: Request) -> Response:
    return JSONResponse({**json.loads(stream.status), "made": runs.provenance})


async def _begin(runs: Runs, request: Request) -> Response:
    fields = parse_run_request(await request.body())
    paused = fields.pop("paused", False)
    return JSONResponse({"id": await runs.begin(fields, paused=paused)}, HTTPStatus.ACCEPTED)


async def _steer(runs: Runs, request: Request) -> Response:
    """Cancel a run, or steer it if the path has a command."""
    run_id, do = request.path_params["run_id"], request.path_params.get("do")
    if do not in (None, "pause", "resume", "micro"):
        raise HTTPException(HTTPStatus.NOT_FOUND, "Not found.")
    _check_empty(await request.body())
    if do is None:
        runs.cancel(run_id)
    else:
        runs.steer(run_id, do)
    return JSONResponse({"id": run_id}, HTTPStatus.ACCEPTED)


def parse_run_request(body: bytes) -> dict[str, Any]:
    """Return the fields of a run request: kind, name or setting, optionally paused. The worker checks the values."""
    fields = _object(body)
    error_text = _form_error(fields)
    if error_text is not None:
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", error_text))
    return fields


def _form_error(fields: Mapping[str, Any]) -> str | None:
    """Return the error in the fields of a run request; None if there is none."""
    kind = fields.get("kind")
    subject = {"playground": "setting", "experiment": "name"}.get(kind if isinstance(kind, str) else "")
    if subject is None or not {"kind", subject} <= fields.keys() <= {"kind", subject, "paused"}:
        return 'Expected: {"kind": "playground", "setting": {...}} or {"kind": "experiment", "name": ...}.'
    if type(fields.get("paused", False)) is not bool:
        return "paused must be true or false."
    if subject == "name" and not (isinstance(fields["name"], str) and _NAME.fullmatch(fields["name"])):
        return "The name of an experiment has lower-case letters, digits and underscores."
    if subject == "setting" and not _is_flat(fields["setting"]):
        return "A setting must be an object of strings and numbers."
    return None


def _is_flat(setting: object) -> bool:
    if not isinstance(setting, dict) or len(setting) > _MAX_SETTINGS:
        return False
    return all(
        isinstance(value, bool | int)
        or (isinstance(value, float) and math.isfinite(value))
        or (isinstance(value, str) and len(value) <= _MAX_TEXT)
        for value in setting.values()
    )


def _check_empty(body: bytes) -> None:
    """Refuse a body that is not empty."""
    if body and _object(body):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "The body must be empty."))


def _object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; refuse NaN, infinities and duplicate keys."""

    def refuse_constant(name: str) -> float:
        raise ValueError(name)

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Parsers differ in which of two equal keys they use.
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError(pairs)
        return dict(pairs)

    try:
        value = json.loads(body, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RefusedError(HTTPStatus.UNPROCESSABLE_ENTITY, Failure("form", "The body must be a JSON object."))
    return value


async def _refusal_response(_request: Request, error: RefusedError) -> Response:
    failure = {"code": error.failure.code, "message": error.failure.message}
    return JSONResponse(failure if error.run is None else {**failure, "id": error.run}, error.status)


async def http_error_response(_request: Request, error: HTTPException) -> Response:
    """Return an HTTP error as JSON."""
    code = HTTPStatus(error.status_code).name.lower()
    return JSONResponse({"code": code, "message": error.detail}, error.status_code, headers=error.headers)


async def serve(
    folder: Path,
    address: ServerAddress,
    on_listening: Callable[[str, str], None],
    *,
    keep: bool = False,
    worker: Sequence[str] = COMMAND,
) -> None:
    """Serve a built page and its runs until the process receives SIGINT or SIGTERM.

    `keep` continues runs that no page watches; `worker` is the command that starts the worker process.
    """
    page, limits = read_page(folder), address.limits
    stream = Stream(limits, time.monotonic)
    runs = Runs(stream, limits, time.monotonic, command=worker, keep=keep)
    await serve_app(partial(make_app, page, runs, stream, limits), address, stream.close, on_listening)
