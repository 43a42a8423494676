"""A real server in a separate process, with raw requests, because HTTP clients would repair broken ones."""

import asyncio
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anybatch_guide.limits import Limits
from anybatch_guide.local_server import ServerAddress
from anybatch_guide.server import serve
from guide.tests.connections import watch_connections

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "guide" / "tests" / "dist"
PROGRAM = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from guide.tests.{{}} import main; main(sys.argv[1:])"
WORKER = (sys.executable, "-c", PROGRAM.format("worker"))
PATIENCE_SECONDS = 120.0
LIMITS: Mapping[str, Any] = {
    "body_seconds": 1.0,
    "terminate_seconds": 0.5,
    "kill_seconds": 1.0,
    "starts_per_second": 50,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: a status, headers with lower-case names, and a body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of the response; empty without one."""
        with contextlib.suppress(ValueError):
            value = json.loads(self.body)
            return str(value.get("code", "")) if isinstance(value, dict) else ""
        return ""


class Served:
    """A server under test, for use in a `with` block.

    Args:
        folder: for the record of its connections.
        limits: overrides of the test limits.
        command: command to start it; None for one with the worker of tests.
    """

    def __init__(self, folder: Path, limits: Mapping[str, Any] | None = None, command: Sequence[str] = ()) -> None:
        self.connections = folder / "connections.txt"
        options = json.dumps({"limits": {**LIMITS, **(limits or {})}, "connections": str(self.connections)})
        self._command = tuple(command) or (sys.executable, "-c", PROGRAM.format("served"), options)

    def __enter__(self) -> Self:
        """Start it, and wait for its address."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "guide/src")),
        }
        self.process = subprocess.Popen(  # noqa: S603 (a fixed program)
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        self.address = next(word for word in said.split() if word.startswith("http://"))
        self.once = said.split()[-1]
        place, _, self.secret = self.address.partition("/?k=")
        self.port = int(place.rpartition(":")[2])
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = f"anybatch-{self.port}={self.secret}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        """Stop it like Ctrl-C."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.said = self.process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.said = self.process.communicate()

    def send(self, parts: Sequence[bytes], *, seconds: float = PATIENCE_SECONDS) -> Answer:
        """Send raw bytes, and return the response until the connection closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as connection:
            with contextlib.suppress(OSError):  # it may respond and close before everything is sent
                for part in parts:
                    connection.sendall(part)
            response = http.client.HTTPResponse(connection)
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read())

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a request like the page's; other bodies than strings are sent as JSON, and empty headers not at all."""
        text = body if isinstance(body, str) else "" if body is None else json.dumps(body)
        usual = {"Host": self.host, "Cookie": self.cookie, "Connection": "close"}
        if method in ("POST", "DELETE"):
            usual |= {"X-Anybatch": "1", "Content-Type": "application/json", "Content-Length": str(len(text.encode()))}
        sent = {name: value for name, value in {**usual, **(headers or {})}.items() if value}
        return self.send([head(method, path, sent), text.encode()])

    def begin(self, name: str, **more: object) -> str:
        """Start an experiment and return the run's id."""
        answer = self.ask("POST", "/api/runs", {"kind": "experiment", "name": name, **more})
        assert answer.status == 202, answer
        return str(json.loads(answer.body)["id"])

    @contextlib.contextmanager
    def events(self, last: str | None = None) -> Iterator[Iterator[tuple[str, Any, str | None]]]:
        """Yield the events of the stream: event, data, id."""
        lines = {"Last-Event-ID": last} if last else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", "/api/events", headers={"Host": self.host, "Cookie": self.cookie, **lines})
            response = connection.getresponse()
            assert response.status == 200, response.status
            yield parsed(response)
        finally:
            connection.close()

    def worker(self) -> int:
        """Return the process id of the worker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (child,) = map(int, children)
        return child

    def until_idle(self) -> None:
        """Wait until the worker is idle."""
        with self.events() as events:
            next(data for event, data, _ in events if event == "status" and data["worker"] == "idle")


def head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Return the head of a request."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def parsed(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[tuple[str, Any, str | None]]:
    """Yield server-sent events: event, data, id."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id")
            fields = {}


def wait_for_end(number: int, seconds: float = PATIENCE_SECONDS) -> bool:
    """Return whether a process, child or not, ends in time."""
    try:
        process = os.pidfd_open(number)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


def main(words: Sequence[str]) -> None:
    """Serve until Ctrl-C."""
    options = json.loads(words[0])
    watch_connections(Path(options["connections"]))
    worker = (*WORKER, options["connections"])
    address = ServerAddress(limits=Limits(**options["limits"]))

    def write_address(reusable: str, once: str) -> None:
        sys.stdout.write(f"{reusable} {once}\n")
        sys.stdout.flush()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(PAGE, address, write_address, worker=worker))
