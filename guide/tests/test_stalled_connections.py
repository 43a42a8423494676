"""Clients with unused connections do not lock out others: real sockets against real servers."""

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anybatch_guide.limits import Limits
from anybatch_guide.stalled_connections import StalledConnections
from guide.tests.served import PATIENCE_SECONDS, Served, head

NUM_CONNECTIONS = 16
SHORT: Mapping[str, Any] = {"head_seconds": 0.5, "unread_seconds": 0.5, "num_connections": NUM_CONNECTIONS}
# Long enough that no time limit ends the connections in these tests.
NEVER: Mapping[str, Any] = {"head_seconds": 1e6, "unread_seconds": 1e6, "num_connections": NUM_CONNECTIONS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with short limits."""
    with Served(tmp_path_factory.mktemp("served"), SHORT) as served:
        yield served


@contextlib.contextmanager
def connected(server: Served, number: int = 1, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections and send the same bytes on each."""
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS))
            for _ in range(number)
        ]
        for connection in connections:
            connection.sendall(sent)
        yield connections


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection; a reset ends it too."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def request(server: Served, path: str = "/") -> bytes:
    """Return a request that is answered and keeps the connection open."""
    return head("GET", path, {"Host": server.host, "Cookie": server.cookie})


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-"])
def test_incomplete_headers_time_out(sent: bytes, server: Served) -> None:
    """The server closes connections that never complete the headers of a request, and answers others afterwards."""
    with connected(server, 2 * NUM_CONNECTIONS, sent) as silent:
        assert [read_to_end(connection) for connection in silent] == [b""] * len(silent)
        assert server.ask("GET", "/api/state").status == 200


def test_idle_connections_make_room(tmp_path: Path) -> None:
    """Silent connections up to the limit leave half of the places free, long before they time out."""
    with Served(tmp_path, NEVER) as server, connected(server, NUM_CONNECTIONS) as silent:
        still_open = list(silent)
        while len(still_open) > NUM_CONNECTIONS // 2:
            closed = select.select(still_open, [], [], PATIENCE_SECONDS)[0]
            assert [read_to_end(connection) for connection in closed] == [b""] * len(closed) != []
            still_open = [connection for connection in still_open if connection not in closed]
        assert len(still_open) == NUM_CONNECTIONS // 2
        assert server.ask("GET", "/api/state").status == 200


def test_kept_alive_connections_time_out(server: Served) -> None:
    """Half a second request does not keep a connection open, although uvicorn's own timer is off."""
    with connected(server, 1, request(server, "/api/state") + b"GET / HTTP/1.1\r\n") as (connection,):
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_unread_responses_time_out(server: Served) -> None:
    """A client that sends requests and reads nothing loses its connection."""

    def ask_without_reading(connection: socket.socket) -> None:
        while True:
            connection.sendall(request(server))

    with connected(server) as (connection,), pytest.raises(ConnectionError):
        ask_without_reading(connection)


@dataclass(eq=False)
class FakeConnection:
    """A fake connection, which is also its transport and exchange."""

    response_complete: bool = False
    unread_bytes: int = 0
    is_aborted: bool = False
    exchange: "FakeConnection | None" = None
    transport: "FakeConnection" = field(init=False)

    def __post_init__(self) -> None:
        self.transport = self

    @property
    def cycle(self) -> "FakeConnection | None":
        """The latest request."""
        return self.exchange

    def get_write_buffer_size(self) -> int:
        """Return the configured value."""
        return self.unread_bytes

    def abort(self) -> None:
        """Record that the connection was closed."""
        self.is_aborted = True


def computing(connection: FakeConnection) -> None:
    """The server is still computing the answer."""
    connection.exchange = connection


def reading(connection: FakeConnection) -> None:
    """The client reads one byte at a time."""
    connection.exchange = connection
    connection.unread_bytes += 1


def not_reading(connection: FakeConnection) -> None:
    """The client does not read the response."""
    connection.exchange = connection
    connection.unread_bytes = 100


def finished_and_unread(connection: FakeConnection) -> None:
    """The application has sent its response, and the client does not read it."""
    not_reading(connection)
    connection.response_complete = True


def silent(connection: FakeConnection) -> None:
    """The client sends no request."""
    connection.exchange = None


@pytest.mark.parametrize(
    ("behaviour", "closed_after"),
    [(computing, None), (reading, None), (not_reading, 30), (finished_and_unread, 30), (silent, 5)],
)
def test_time_limits(behaviour: Callable[[FakeConnection], None], closed_after: int | None) -> None:
    """Only connections without progress are closed: idle ones after `head_seconds`, unread ones after longer."""
    clock = iter(range(100))
    stalled = StalledConnections(Limits(head_seconds=5, unread_seconds=30), lambda: float(next(clock)))
    connection = FakeConnection()
    aborted = None
    for second in range(60):
        behaviour(connection)
        stalled.close([connection])
        if connection.is_aborted:
            aborted = second
            break
    assert aborted == closed_after
