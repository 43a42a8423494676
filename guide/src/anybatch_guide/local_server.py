"""Serve an application to everyone who has the printed address, until the process receives a signal."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from anybatch.errors import UserError
from anybatch_guide.guard import LOOPBACK_NAMES, Admission, App
from anybatch_guide.limits import Limits


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of a connection; the connection stalls while this value does not change."""

    exchange: RequestResponseCycle | None  # the latest request; None before the first
    is_idle: bool  # whether the connection waits for a complete request
    unread_bytes: int  # bytes of the response that the client has not received


class StalledConnections:
    """Closes stalled connections each time it is called.

    A connection stalls while it waits for the headers of a request, or while its response is not read. A request that
    the server is still processing does not stall. uvicorn limits neither, so silent clients could use all connections.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._since: dict[H11Protocol, tuple[_Progress, float]] = {}

    def close(self, connections: Collection[H11Protocol]) -> None:
        """Close the connections that have stalled for too long, and the oldest idle ones if there are too many."""
        now = self._clock()
        before, self._since = self._since, {}
        idle: list[H11Protocol] = []
        for connection in tuple(connections):
            progress = _progress(connection)
            former = before.get(connection)
            since = former[1] if former is not None and former[0] == progress else now
            self._since[connection] = progress, since
            limit = self._limits.head_seconds if progress.is_idle else self._limits.unread_seconds
            if (progress.is_idle or progress.unread_bytes) and now - since >= limit:
                connection.transport.abort()
            elif progress.is_idle:
                idle.append(connection)
        # Otherwise a client could use all connections by opening them faster than they time out.
        idle.sort(key=lambda connection: self._since[connection][1])
        for connection in idle[: max(0, len(idle) - self._limits.num_connections // 2)]:
            connection.transport.abort()


def _progress(connection: H11Protocol) -> _Progress:
    exchange, unread_bytes = connection.cycle, connection.transport.get_write_buffer_size()
    is_idle = (exchange is None or exchange.response_complete) and not unread_bytes
    return _Progress(exchange, is_idle, unread_bytes)


_CHECK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address to listen on, the accepted host names, and the limits."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # port to listen on; 0 for any free port
    names: frozenset[str] = frozenset()  # accepted host names, in addition to loopback names
    limits: Limits = Limits()  # noqa: RUF009 (frozen)


async def serve_app(
    app_for: Callable[[Admission], App],
    address: ServerAddress,
    close_streams: Callable[[], None],
    on_listening: Callable[[str, str], None],
) -> None:
    """Serve an application until the process receives SIGINT or SIGTERM."""
    sockets = _listen(address)
    # Read from the socket, because port 0 means any free port.
    port = sockets[0].getsockname()[1]
    names = LOOPBACK_NAMES | address.names | ({address.host} - {"0.0.0.0", "::"})  # noqa: S104 (not bound)
    admission = Admission(port=port, hosts=names, one_time_key=secrets.token_urlsafe())
    server = uvicorn.Server(_config(app_for(admission), address.limits))
    host = f"[{address.host}]" if ":" in address.host else address.host
    on_listening(f"http://{host}:{port}/?k={admission.secret}", f"http://{host}:{port}/?k={admission.one_time_key}")
    watch_task = asyncio.create_task(_watch(server, close_streams, StalledConnections(address.limits)))
    try:
        await server.serve(sockets=sockets)
    finally:
        # If the server fails, this task would wait for a signal forever.
        watch_task.cancel()


async def _watch(server: uvicorn.Server, close_streams: Callable[[], None], stalled: StalledConnections) -> None:
    """Close stalled connections while the server runs, and all streams when it stops, because it waits for them."""
    while not server.should_exit:
        stalled.close(cast("set[H11Protocol]", server.server_state.connections))
        await asyncio.sleep(_CHECK_SECONDS)  # a signal handler of the server sets `should_exit`
    close_streams()


def _config(app: App, limits: Limits) -> uvicorn.Config:
    """Return the uvicorn configuration: HTTP/1.1 only, no Server header, no request log."""
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
        # No proxy is expected, so a client could forge such headers.
        proxy_headers=False,
        limit_concurrency=limits.num_connections,
        timeout_graceful_shutdown=5,
        # The size limit for headers, because the guard receives them only when they are complete.
        h11_max_incomplete_event_size=16 * 2**10,
    )


def _listen(address: ServerAddress) -> list[socket.socket]:
    """Return listening sockets: for 127.0.0.1 also ::1, so that no other program can be `localhost` on this port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sockets = [socket.create_server((address.host, address.port), family=family)]
    except OSError as error:
        message = (
            f"cannot listen on {address.host}, port {address.port}: {error.strerror}. "
            "Choose another --port, or omit it for any free port."
        )
        raise UserError(message) from error
    if address.host == "127.0.0.1":
        with contextlib.suppress(OSError):  # a machine without IPv6
            sockets.append(socket.create_server(("::1", sockets[0].getsockname()[1]), family=socket.AF_INET6))
    return sockets
