"""The guide's security list: each request with its expected answer, sent byte by byte to a real server."""

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from anybatch_guide.guard import HEADERS
from guide.tests.served import Answer, Served, head, wait_for_end

pytestmark = pytest.mark.slow

GOOD = json.dumps({"kind": "experiment", "name": "mathematics"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request.

    Attributes:
        name: a description.
        send: function (server) -> its answer.
        status: the expected status.
        code: a word expected in the answer; empty if the web server itself answers.
    """

    name: str
    send: Callable[[Served], Answer]
    status: int
    code: str


def get(path: str = "/", **headers: str) -> Callable[[Served], Answer]:
    """Return a GET request like the page's, except for some headers; an empty value removes one."""
    return lambda server: server.ask("GET", path, headers=named(headers, server))


def post(body: str = GOOD, path: str = "/api/runs", method: str = "POST", **headers: str) -> Callable[[Served], Answer]:
    """Return a POST request like the page's, except for some headers; an empty value removes one."""
    return lambda server: server.ask(method, path, body, headers=named(headers, server))


def named(headers: Mapping[str, str], server: Served) -> dict[str, str]:
    """Return headers by name, with dashes, and the server's {host}, {port} and {secret} filled in."""
    own = {"host": server.host, "port": server.port, "secret": server.secret}
    filled = {name: value.format(**own) for name, value in headers.items()}
    return {name.replace("_", "-"): value for name, value in filled.items()}


def raw(*parts: str) -> Callable[[Served], Answer]:
    """Return a raw request, with the server's {host} and {cookie} filled in."""
    return lambda server: server.send([part.format(host=server.host, cookie=server.cookie).encode() for part in parts])


def slow(server: Served) -> Answer:
    """Send only half of a body."""
    usual = {"Host": server.host, "Cookie": server.cookie, "X-Anybatch": "1", "Content-Type": "application/json"}
    return server.send([head("POST", "/api/runs", {**usual, "Content-Length": str(len(GOOD))}), GOOD[:9].encode()])


def huge(server: Served) -> Answer:
    """Send an endless chunked body until the connection closes."""
    usual = {"Host": server.host, "Cookie": server.cookie, "X-Anybatch": "1", "Content-Type": "application/json"}
    chunk = b"1000\r\n" + b"x" * 0x1000 + b"\r\n"
    return server.send([head("POST", "/api/runs", {**usual, "Transfer-Encoding": "chunked"}), *[chunk] * 1000])


DOORS: Sequence[Attempt] = (
    Attempt("no secret", get(Cookie=""), 403, "secret"),
    Attempt("no secret, a script of the page", get("/app.js", Cookie=""), 403, "secret"),
    Attempt("no secret, a recording", get("/rec/small.json", Cookie=""), 403, "secret"),
    Attempt("no secret, the state", get("/api/state", Cookie=""), 403, "secret"),
    Attempt("no secret, a run", post(Cookie=""), 403, "secret"),
    Attempt("wrong secret in the cookie", get(Cookie="anybatch-{port}=AAAA"), 403, "secret"),
    Attempt("the secret under another port's name", get(Cookie="anybatch-1={secret}"), 403, "secret"),
    Attempt("wrong secret in the address", get("/?k=AAAA", Cookie=""), 403, "secret"),
    Attempt("foreign Host", get(Host="evil.example"), 421, "host"),
    Attempt("foreign Host that begins like loopback", get(Host="127.evil.example:{port}"), 421, "host"),
    Attempt("foreign Host that ends like loopback", get(Host="evil-localhost:{port}"), 421, "host"),
    Attempt("foreign Host with loopback as its user", get(Host="127.0.0.1@evil.example"), 421, "host"),
    Attempt("Host with a trailing dot", get(Host="localhost.:{port}"), 421, "host"),
    Attempt("rebinding: Host and Origin", post(Host="evil.example", Origin="http://evil.example"), 421, "host"),
    Attempt("rebinding, read only", get("/api/state", Host="evil.example", Sec_Fetch_Site="same-origin"), 421, "host"),
    Attempt("two Hosts", raw("GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n"), 400, ""),
    Attempt("no Host", raw("GET / HTTP/1.1\r\nCookie: {cookie}\r\n\r\n"), 400, ""),
    Attempt("no Host, HTTP/1.0", raw("GET / HTTP/1.0\r\nCookie: {cookie}\r\n\r\n"), 421, "host"),
    Attempt("cross-site page, a run", post(Sec_Fetch_Site="cross-site"), 403, "site"),
    Attempt("cross-site page, the page", get(Sec_Fetch_Site="cross-site"), 403, "site"),
    Attempt("page of another port of localhost", post(Sec_Fetch_Site="same-site"), 403, "site"),
    Attempt("the same, by its Origin", post(Origin="http://127.0.0.1:1"), 403, "origin"),
    Attempt("the same, the stream", get("/api/events", Sec_Fetch_Site="same-site"), 403, "site"),
    Attempt("frame of another page", get(Sec_Fetch_Site="none", Sec_Fetch_Dest="iframe"), 403, "site"),
    Attempt("state in the address bar", get("/api/state", Sec_Fetch_Site="none"), 403, "site"),
    Attempt("Origin null", post(Origin="null"), 403, "origin"),
    Attempt("Origin with https", post(Origin="https://{host}"), 403, "origin"),
    Attempt("preflight", raw("OPTIONS /api/runs HTTP/1.1\r\nHost: {host}\r\nX: y\r\n\r\n"), 405, "method"),
    Attempt("other methods", raw("PUT /api/runs HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n"), 405, "method"),
    Attempt("POST to the page", post(path="/"), 405, "method"),
    Attempt("form of another page (text/plain)", post(Content_Type="text/plain"), 415, "type"),
    Attempt("form of another page (urlencoded)", post(Content_Type="application/x-www-form-urlencoded"), 415, "type"),
    Attempt("no content type", post(Content_Type=""), 415, "type"),
    Attempt("no header X-Anybatch", post(X_Anybatch=""), 403, "header"),
    Attempt("header X-Anybatch twice", raw(
        "POST /api/runs HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\nX-Anybatch: 1\r\nX-Anybatch: 1\r\n\r\n"
    ), 400, "headers"),
    Attempt("huge body, announced", post("x" * 5000), 413, "size"),
    Attempt("huge body, in chunks", huge, 413, "size"),
    Attempt("slow body", slow, 408, "slow"),
    Attempt("two lengths", raw(
        "POST /api/runs HTTP/1.1\r\nHost: {host}\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n12345"
    ), 400, ""),
    Attempt("smuggling: length and chunks", raw(
        "POST /api/runs HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\nX-Anybatch: 1\r\n"
        "Content-Type: application/json\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ), 422, "form"),
    Attempt("line break in a header", raw("GET / HTTP/1.1\r\nHost: {host}\r\nX: a\n b: c\0\r\n\r\n"), 400, ""),
    Attempt("WebSocket", get(
        "/api/events", Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Key="AAAA", Sec_WebSocket_Version="13"
    ), 400, "upgrade"),
    Attempt("/../", get("/../server.py"), 404, "not_found"),
    Attempt("/rec/../../", get("/rec/../../server.py"), 404, "not_found"),
    Attempt("%2e%2e", get("/%2e%2e/server.py"), 404, "not_found"),
    Attempt("%2e%2e%2f", get("/rec/%2e%2e%2f%2e%2e%2fserver.py"), 404, "not_found"),
    Attempt("backslashes", get("/rec\\..\\..\\server.py"), 404, "not_found"),
    Attempt("NUL", get("/rec/small.json%00.html"), 404, "not_found"),
    Attempt("absolute address", get("http://evil.example/"), 404, "not_found"),
    Attempt("two slashes", get("//evil.example/"), 404, "not_found"),
    Attempt("account of the build", get("/BUILD.json"), 404, "not_found"),
)  # fmt: skip
FORMS: Sequence[Attempt] = (
    Attempt("no JSON", post("{"), 422, "form"),
    Attempt("a list", post("[]"), 422, "form"),
    Attempt("nested 2,000 deep", post("[" * 2000 + "]" * 2000), 422, "form"),
    Attempt("a number of 4,000 digits", post('{"kind":' + "9" * 4000 + "}"), 422, "form"),
    Attempt("NaN", post('{"kind":NaN}'), 422, "form"),
    Attempt("a duplicate name", post('{"kind":"experiment","name":"a","name":"b"}'), 422, "form"),
    Attempt("unknown kind", post('{"kind":"shell","name":"a"}'), 422, "form"),
    Attempt("kind that is a list", post('{"kind":["experiment"],"name":"a"}'), 422, "form"),
    Attempt("one key too many", post('{"kind":"experiment","name":"a","module":"os"}'), 422, "form"),
    Attempt("path as a name", post('{"kind":"experiment","name":"../../etc/passwd"}'), 422, "form"),
    Attempt("module as a name", post('{"kind":"experiment","name":"os.system"}'), 422, "form"),
    Attempt("unknown experiment", post('{"kind":"experiment","name":"nothing"}'), 422, "unknown_experiment"),
    Attempt("paused that is a number", post('{"kind":"experiment","name":"a","paused":1}'), 422, "form"),
    Attempt("a setting without its keys", post('{"kind":"playground","setting":{}}'), 422, "keys"),
    Attempt("setting that is a list", post('{"kind":"playground","setting":[1]}'), 422, "form"),
    Attempt("setting with a list in it", post('{"kind":"playground","setting":{"steps":[1]}}'), 422, "form"),
    Attempt("pause of an unknown run", post("{}", "/api/runs/aaaaaaaaaaaa/pause"), 404, "unknown_run"),
    Attempt("cancel of an unknown run", post("", "/api/runs/aaaaaaaaaaaa", "DELETE"), 404, "unknown_run"),
    Attempt("run by a path", post("", "/api/runs/..%2f..%2fetc", "DELETE"), 405, "method_not_allowed"),
    Attempt("unknown command", post("{}", "/api/runs/aaaaaaaaaaaa/exec"), 404, "not_found"),
)


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


@pytest.mark.parametrize("attempt", DOORS, ids=lambda attempt: attempt.name)
def test_access(attempt: Attempt, server: Served) -> None:
    """Requests from another page, with another host, without the secret or in another form are refused."""
    check(attempt, server)


@pytest.mark.parametrize("attempt", FORMS, ids=lambda attempt: attempt.name)
def test_forms(attempt: Attempt, server: Served) -> None:
    """Requests that the page would not send are refused for everyone."""
    check(attempt, server)


def test_worker_ends_with_its_server(tmp_path: Path) -> None:
    """A server that is killed during a run leaves no processes."""
    with Served(tmp_path) as server:
        server.begin("stuck")
        worker = server.worker()
        server.process.kill()
        server.process.wait()
        has_ended = wait_for_end(worker, seconds=30.0)
        if not has_ended:
            os.kill(worker, signal.SIGKILL)
    assert has_ended


def test_time_for_the_body_is_limited(server: Served) -> None:
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
