"""The guide's security list: each request with its expected answer, sent byte by byte to a real server.

`python -m guide.tests.security` prints it as a table, against the package's real worker.
"""

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guide.tests.served import Answer, Served, head, wait_for_end

SETTING: Mapping[str, Any] = {
    "task": "digits",
    "norm": "none",
    "micro_batch_size": 16,
    "accumulation_steps": 4,
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "steps": 3,
    "seed": 0,
    "precision": "fp32",
    "mistake": "",
    "ranks": 1,
    "norm_policy": "keep",
    "memory_limit_kib": 0,
}
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


def get(path: str = "/", drop: str = "", **headers: str) -> Callable[[Served], Answer]:
    """Return a GET request like the page's, except for some headers; underscores in their names become dashes."""

    def send(server: Served) -> Answer:
        usual = {"Host": server.host, "Cookie": server.cookie, "Connection": "close"} | named(headers, server)
        return server.send([head("GET", path, {name: value for name, value in usual.items() if name != drop})])

    return send


def post(body: str = GOOD, path: str = "/api/runs", method: str = "POST", **headers: str) -> Callable[[Served], Answer]:
    """Return a POST request like the page's, except for some headers; an empty value removes one."""

    def send(server: Served) -> Answer:
        usual = {
            "Host": server.host,
            "Cookie": server.cookie,
            "Connection": "close",
            "X-Anybatch": "1",
            "Content-Type": "application/json",
            "Content-Length": str(len(body.encode())),
        } | named(headers, server)
        return server.send([head(method, path, {name: value for name, value in usual.items() if value}), body.encode()])

    return send


def named(headers: Mapping[str, str], server: Served) -> dict[str, str]:
    """Return headers by name, with the server's {host}, {port} and {secret} filled in."""
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


def setting(**changed: object) -> str:
    """Return a request for a playground run, with some values changed; None removes one."""
    values = {name: value for name, value in {**SETTING, **changed}.items() if value is not None}
    return json.dumps({"kind": "playground", "setting": values})


DOORS: Sequence[Attempt] = (
    Attempt("no secret", get(drop="Cookie"), 403, "secret"),
    Attempt("no secret, a script of the page", get("/app.js", drop="Cookie"), 403, "secret"),
    Attempt("no secret, a recording", get("/rec/small.json", drop="Cookie"), 403, "secret"),
    Attempt("no secret, the state", get("/api/state", drop="Cookie"), 403, "secret"),
    Attempt("no secret, a run", post(Cookie=""), 403, "secret"),
    Attempt("wrong secret in the cookie", get(Cookie="anybatch-{port}=AAAA"), 403, "secret"),
    Attempt("the secret under another port's name", get(Cookie="anybatch-1={secret}"), 403, "secret"),
    Attempt("wrong secret in the address", get("/?k=AAAA", drop="Cookie"), 403, "secret"),
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
    Attempt("setting that is a list", post('{"kind":"playground","setting":[1]}'), 422, "form"),
    Attempt("setting with a list in it", post('{"kind":"playground","setting":{"steps":[1]}}'), 422, "form"),
    Attempt("pause of an unknown run", post("{}", "/api/runs/aaaaaaaaaaaa/pause"), 404, "unknown_run"),
    Attempt("cancel of an unknown run", post("", "/api/runs/aaaaaaaaaaaa", "DELETE"), 404, "unknown_run"),
    Attempt("run by a path", post("", "/api/runs/..%2f..%2fetc", "DELETE"), 405, "method_not_allowed"),
    Attempt("unknown command", post("{}", "/api/runs/aaaaaaaaaaaa/exec"), 404, "not_found"),
)
SETTINGS: Sequence[Attempt] = tuple(
    Attempt(f"setting: {name}", post(setting(**changed)), 422, code)
    for name, changed, code in (
        ("0 samples", {"micro_batch_size": 0}, "micro_batch_size"),
        ("true for 1", {"micro_batch_size": True}, "micro_batch_size"),
        ("16.0 for 16", {"micro_batch_size": 16.0}, "micro_batch_size"),
        ("word for a number", {"steps": "3"}, "steps"),
        ("1e99 steps", {"steps": 10**99}, "steps"),
        ("learning rate 1e99", {"learning_rate": 1e99}, "learning_rate"),
        ("one key missing", {"seed": None}, "keys"),
        ("one key too many", {"module": "os"}, "keys"),
        ("task by a path", {"task": "../../data.pkl"}, "task"),
        ("unknown mistake", {"mistake": "__import__('os')"}, "mistake"),
        ("a thousand ranks", {"ranks": 1000}, "ranks"),
        ("policy by an expression", {"norm_policy": "Ghost(4)"}, "norm_policy"),
        ("negative limit", {"memory_limit_kib": -1}, "memory_limit_kib"),
        ("batch too large", {"micro_batch_size": 256, "accumulation_steps": 64}, "batch_too_large"),
        ("too much work", {"micro_batch_size": 64, "accumulation_steps": 64, "steps": 2000}, "too_much_work"),
    )
)


def while_busy(server: Served) -> Iterator[tuple[str, str, str]]:
    """Yield the attempts around a run: name, response, verdict."""
    run = server.begin("endless")
    second = server.ask("POST", "/api/runs", {"kind": "experiment", "name": "counting"})
    yield "second start", short(second), verdict((second.status, json.loads(second.body)["id"]), (409, run))
    with server.events() as events:
        next(data for event, data, _ in events if event == "lines")
        cancelled = server.ask("DELETE", f"/api/runs/{run}")
        ends = next(event for event, data, _ in events if event in ("cancelled", "failed"))
    yield "cancel while it runs", f"{short(cancelled)}, then event: {ends}", verdict(ends, "cancelled")
    for name, signals in (("stuck", "SIGTERM"), ("deaf", "SIGKILL")):
        run = server.begin(name)
        with server.events() as events:
            next(data for event, data, _ in events if event == "lines")
            server.ask("DELETE", f"/api/runs/{run}")
            ends = next(event for event, data, _ in events if event in ("cancelled", "failed"))
            next(data for event, data, _ in events if event == "status" and data["worker"] == "idle")
        answer = f"{signals} ends the worker, event: {ends}, another one is idle"
        yield f"cancel of a run that is {name}", answer, verdict(ends, "cancelled")
    server.begin("endless")
    with server.events() as events:
        next(data for event, data, _ in events if event == "lines")
        os.kill(server.worker(), signal.SIGKILL)
        failed = next(data for event, data, _ in events if event == "failed")
        next(data for event, data, _ in events if event == "status" and data["worker"] == "idle")
    yield (
        "kill -9 of the worker",
        f"event: failed ({failed['code']}), another one is idle",
        verdict(failed["code"], "worker"),
    )


def orphan(server: Served) -> tuple[str, str, str]:
    """Kill the server during a run, and return the state of its worker."""
    server.begin("stuck")
    worker = server.worker()
    server.process.kill()
    server.process.wait()
    has_ended = wait_for_end(worker, seconds=30.0)
    if not has_ended:
        os.kill(worker, signal.SIGKILL)
    answer = "its worker ends" if has_ended else "its worker stays"
    return "kill -9 of the server", answer, verdict(has_ended, wanted=True)


def short(answer: Answer) -> str:
    """Return a short form of a response."""
    return f"{answer.status} {answer.code}".strip()


def verdict(found: object, wanted: object) -> str:
    """Return whether a response is the expected one."""
    return "ok" if found == wanted else f"WRONG: {wanted!r} was wanted"


def main() -> int:
    """Print the table; return whether a response was wrong."""
    rows: list[tuple[str, str, str]] = []
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder)) as server:
        server.until_idle()
        for attempt in (*DOORS, *FORMS, *SETTINGS):
            answer = attempt.send(server)
            rows.append(
                (attempt.name, short(answer), verdict((answer.status, answer.code), (attempt.status, attempt.code)))
            )
        rows += [*while_busy(server), orphan(server)]
        lines = server.connections.read_text().splitlines() if server.connections.exists() else []
        rows.append(("connections to anywhere", str(len(lines)), verdict(lines, [])))
    sys.stdout.write("| request | answer | |\n|---|---|---|\n")
    sys.stdout.writelines(f"| {name} | {answer} | {found} |\n" for name, answer, found in rows)
    return int(any(found != "ok" for _, _, found in rows))


if __name__ == "__main__":
    sys.exit(main())
