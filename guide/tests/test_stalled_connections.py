"""Clients with unused connections do not lock out others: real sockets against real servers."""

import contextlib
import select
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from guide.tests.served import PATIENCE_SECONDS, Served, head

pytestmark = pytest.mark.slow

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


def test_unread_responses_time_out(server: Served) -> None:
    """A client that sends requests and reads nothing loses its connection."""

    def ask_without_reading(connection: socket.socket) -> None:
        while True:
            connection.sendall(request(server))

    with connected(server) as (connection,), pytest.raises(ConnectionError):
        ask_without_reading(connection)
