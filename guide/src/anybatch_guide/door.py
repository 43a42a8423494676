"""Where a server of ours listens, and until when: on this machine, for whoever has the printed address."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import uvicorn

from anybatch.errors import UserError
from anybatch_guide.guard import LOOPBACK_NAMES, Admission, App
from anybatch_guide.limits import Limits
from anybatch_guide.stalled_connections import Connection, StalledConnections

_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The address that is listened at.

    Attributes:
        host: address to listen at.
        port: to listen at; 0 for one that is free.
        names: by which the server may be asked, besides those of loopback.
        limits: of connections.
    """

    host: str = "127.0.0.1"
    port: int = 0
    names: frozenset[str] = frozenset()
    limits: Limits = Limits()  # noqa: RUF009 (frozen)


async def serve_app(
    app_for: Callable[[Admission], App],
    door: Door,
    close_streams: Callable[[], None],
    on_listening: Callable[[str, str], None],
) -> None:
    """Serve an application until the process is asked to end (SIGINT, SIGTERM).

    Args:
        app_for: makes it, guarded by what is admitted.
        door: where.
        close_streams: ends responses that have no end of their own.
        on_listening: called once it listens, with the address to show, and one that admits a single browser, once.

    Raises:
        UserError: the address cannot be listened at.
    """
    sockets = _listen(door)
    # Read from the socket, since port 0 asks for any that is free.
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
    """Close stalled connections while the server runs, and all streams when it wants to end: it waits for them."""
    while not server.should_exit:
        stalled.close(cast("set[Connection]", server.server_state.connections))
        await asyncio.sleep(_LOOK_SECONDS)  # a signal handler of the server sets `should_exit`
    close_streams()


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


def _listen(door: Door) -> list[socket.socket]:
    """Return what listens: at 127.0.0.1 also at ::1, so that no other program can be localhost on this port."""
    family = socket.AF_INET6 if ":" in door.host else socket.AF_INET
    try:
        sockets = [socket.create_server((door.host, door.port), family=family)]
    except OSError as error:
        message = (
            f"nothing can listen at {door.host}, port {door.port}: {error.strerror}. "
            "Name another --port, or leave it out for one that is free."
        )
        raise UserError(message) from error
    if door.host == "127.0.0.1":
        with contextlib.suppress(OSError):  # a machine without IPv6
            sockets.append(socket.create_server(("::1", sockets[0].getsockname()[1]), family=socket.AF_INET6))
    return sockets
