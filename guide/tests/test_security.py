"""The security list against a real server, with raw responses; see `guide/tests/security.py`."""

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anybatch_guide.guard import HEADERS
from guide.tests.security import DOORS, FORMS, SETTINGS, Attempt, orphan, while_busy
from guide.tests.served import Served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose worker is warm."""
    with Served(tmp_path_factory.mktemp("served")) as served:
        served.until_idle()
        yield served


def check(attempt: Attempt, server: Served) -> None:
    """Compare a response with the expected one, and check the headers of every response."""
    answer = attempt.send(server)

    assert (answer.status, answer.code) == (attempt.status, attempt.code), answer
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert "server" not in answer.headers
    assert "set-cookie" not in answer.headers
    assert b"Traceback" not in answer.body
    assert server.secret.encode() not in answer.body
    if attempt.code:  # otherwise the HTTP was invalid, and the web server answered
        assert all(answer.headers[name.decode()] == value.decode() for name, value in HEADERS)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", DOORS, ids=lambda attempt: attempt.name)
def test_door(attempt: Attempt, server: Served) -> None:
    """Requests from another page, with another host, without the secret or in another form are refused."""
    check(attempt, server)


@pytest.mark.parametrize("attempt", FORMS, ids=lambda attempt: attempt.name)
def test_form(attempt: Attempt, server: Served) -> None:
    """Requests that the page would not send are refused for everyone."""
    check(attempt, server)


@pytest.mark.parametrize("attempt", SETTINGS, ids=lambda attempt: attempt.name)
def test_setting(attempt: Attempt, server: Served) -> None:
    """A setting with a wrong type, or too much work, is refused with a code."""
    check(attempt, server)


@pytest.mark.slow
def test_around_a_run(server: Served) -> None:
    """One run at a time; each can be cancelled, even if it ignores commands; a killed worker is replaced."""
    rows = list(while_busy(server))

    assert len(rows) == 5
    assert [row for row in rows if row[2] != "ok"] == []


@pytest.mark.slow
def test_worker_ends_with_its_server(tmp_path: Path) -> None:
    """A server that is killed during a run leaves no processes."""
    with Served(tmp_path) as served:
        assert orphan(served)[2] == "ok"


@pytest.mark.slow
def test_body_within_its_time(server: Served) -> None:
    """The time limit is for the whole body, so a body that arrives byte by byte is too slow."""
    stop = threading.Event()
    usual = f"Host: {server.host}\r\nCookie: {server.cookie}\r\nX-Anybatch: 1\r\nContent-Type: application/json"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"POST /api/runs HTTP/1.1\r\n{usual}\r\nContent-Length: 4000\r\n\r\n".encode())

        def drip() -> None:
            while not stop.wait(0.05):
                connection.sendall(b" ")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            answered = connection.recv(4096)
        finally:
            stop.set()
            dripping.join()
    assert answered.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        *(("gzip, deflate, br", True), ("br;q=1.0, GZIP;q=0.8", True), ("gzip;q=0, br", False), ("gzip;q=0.0", False)),
        *(("identity", False), ("x-gzip-not", False), ("", False), (";;,", False)),
    ],
)
def test_text_travels_compressed(accepted: str, compressed: bool, server: Served) -> None:
    """The page is compressed for clients that accept gzip, and otherwise equal."""
    plain = server.ask("GET", "/")
    answer = server.ask("GET", "/", headers={"Accept-Encoding": accepted})

    assert (answer.headers.get("content-encoding") == "gzip") == compressed
    assert (gzip.decompress(answer.body) if compressed else answer.body) == plain.body
    assert answer.headers["vary"] == "accept-encoding"


def test_no_outgoing_traffic(server: Served) -> None:
    """Neither the server nor its worker made a connection or a DNS request in the tests above."""
    run = server.begin("mathematics")
    with server.events() as events:
        result = next(data for event, data, _ in events if event == "result")

    assert result["run"] == run
    assert not server.connections.exists(), server.connections.read_text()


def test_traffic_would_be_seen(tmp_path: Path) -> None:
    """The observation in the test above detects a real connection."""
    program = (
        "import socket, sys; from pathlib import Path; from guide.tests.connections import watch_connections\n"
        "watch_connections(Path(sys.argv[1])); socket.socket().connect_ex(('127.0.0.1', 1))"
    )
    file = tmp_path / "connections.txt"
    subprocess.run([sys.executable, "-c", program, str(file)], check=True)  # noqa: S603 (a fixed program)

    assert "127.0.0.1" in file.read_text()
