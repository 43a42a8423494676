"""Run a server on this machine, for anyone with the printed address, until the process is asked to stop."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol, cast

import uvicorn

from anybatch.errors import UserError
from anybatch_guide.guard import LOOPBACK_NAMES, Admission, App
from anybatch_guide.limits import Limits


class Transport(Protocol):
    """The transport of a connection in asyncio."""

    def get_write_buffer_size(self) -> int:
        """Return the number of bytes that the client has not received yet."""

    def abort(self) -> None:
        """Close the socket and drop these bytes."""


class Exchange(Protocol):
    """A request whose headers are complete, with its response."""

    @property
    def response_complete(self) -> bool:
        """Whether the application has sent all of the response."""


class Connection(Protocol):
    """A connection in uvicorn."""

    @property
    def transport(self) -> Transport:
        """The socket."""

    @property
    def cycle(self) -> Exchange | None:
        """The latest request; None before the first."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """The progress of a connection: it stalls while this does not change."""

    exchange: Exchange | None  # the latest request; None before the first
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
        self._since: dict[Connection, tuple[_Progress, float]] = {}

    def close(self, connections: Collection[Connection]) -> None:
        """Close the connections that have stalled for too long, and the oldest idle ones if there are too many."""
        now = self._clock()
        before, self._since = self._since, {}
        idle: list[Connection] = []
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
        # A client that opens connections faster than they time out must not use all of them either.
        idle.sort(key=lambda connection: self._since[connection][1])
        for connection in idle[: max(0, len(idle) - self._limits.num_connections // 2)]:
            connection.transport.abort()


def _progress(connection: Connection) -> _Progress:
    exchange, unread_bytes = connection.cycle, connection.transport.get_write_buffer_size()
    is_idle = (exchange is None or exchange.response_complete) and not unread_bytes
    return _Progress(exchange, is_idle, unread_bytes)


_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The address to listen on."""

    host: str = "127.0.0.1"  # address to listen on
    port: int = 0  # port to listen on; 0 for any free port
    names: frozenset[str] = frozenset()  # accepted host names, in addition to loopback names
    limits: Limits = Limits()  # noqa: RUF009 (frozen)


async def serve_app(
    app_for: Callable[[Admission], App],
    door: Door,
    close_streams: Callable[[], None],
    on_listening: Callable[[str, str], None],
) -> None:
    """Serve an application until the process receives SIGINT or SIGTERM."""
    sockets = _listen(door)
    # Read from the socket, because port 0 means any free port.
    port = sockets[0].getsockname()[1]
    names = LOOPBACK_NAMES | door.names | ({door.host} - {"0.0.0.0", "::"})  # noqa: S104 (taken out, not bound)
    admission = Admission(port=port, hosts=names, once=secrets.token_urlsafe())
    server = uvicorn.Server(_config(app_for(admission), door.limits))
    shown = f"[{door.host}]" if ":" in door.host else door.host
    on_listening(f"http://{shown}:{port}/?k={admission.secret}", f"http://{shown}:{port}/?k={admission.once}")
    watching = asyncio.create_task(_watch(server, close_streams, StalledConnections(door.limits)))
    try:
        await server.serve(sockets=sockets)
    finally:
        # A server that fails leaves this task waiting for a signal.
        watching.cancel()


async def _watch(server: uvicorn.Server, close_streams: Callable[[], None], stalled: StalledConnections) -> None:
    """Close stalled connections while the server runs, and all streams when it stops, because it waits for them."""
    while not server.should_exit:
        stalled.close(cast("set[Connection]", server.server_state.connections))
        await asyncio.sleep(_LOOK_SECONDS)  # a signal handler of the server sets `should_exit`
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
        # Limits the headers of a request, which the guard sees only when they are complete.
        h11_max_incomplete_event_size=16 * 2**10,
    )


def _listen(door: Door) -> list[socket.socket]:
    """Return the sockets: for 127.0.0.1 also ::1, so that no other program is localhost on this port."""
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    try:
        sockets = [socket.create_server((door.host, door.port), family=family)]
    except OSError as error:
        message = (
            f"cannot listen on {door.host}, port {door.port}: {error.strerror}. "
            "Choose another --port, or omit it for any free port."
        )
        raise UserError(message) from error
    if door.host == "127.0.0.1":
        with contextlib.suppress(OSError):  # a machine without IPv6
            sockets.append(socket.create_server(("::1", sockets[0].getsockname()[1]), family=socket.AF_INET6))
    return sockets
