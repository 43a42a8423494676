"""The guard accepts the page in all legitimate ways, and sets its security headers."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest

from anybatch_guide.guard import Admission, Guard, Receive, Scope, Send, host_name
from anybatch_guide.limits import Limits

PORT = 8123


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    """Return the request, in a response that tries to loosen the policy."""
    body = b""
    if scope["method"] == "POST":
        body = (await receive())["body"]
    headers = [(b"Content-Security-Policy", b"default-src *"), (b"x-own", b"yes")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": scope["path"].encode() + b" " + body})


def ask(
    admission: Admission,
    path: str = "/",
    *,
    method: str = "GET",
    host: str = "127.0.0.1:8123",
    content: bytes = b"",
    **headers: str,
) -> httpx.Response:
    """Send one request through the guard."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=Guard(inner, admission, Limits()))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, headers=named, content=content)

    return asyncio.run(send())


def cookie(admission: Admission) -> str:
    """Return the cookie of an accepted browser."""
    return f"other=1; {admission.cookie_name}={admission.secret}; more=2"


def test_launch() -> None:
    """The printed address sets a cookie hidden from scripts and other sites, and redirects to an address."""
    admission = Admission(port=PORT)
    answer = ask(admission, f"/?k={admission.secret}", Sec_Fetch_Site="none", Sec_Fetch_Dest="document")

    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"] == f"anybatch-8123={admission.secret}; HttpOnly; SameSite=Strict; Path=/"
    page = ask(admission, "/", Cookie=cookie(admission), Sec_Fetch_Site="none", Sec_Fetch_Dest="document")
    assert (page.status_code, page.text) == (200, "/ ")


def test_address_for_a_browser_works_once() -> None:
    """The address for starting a browser, which other users may see, works only once."""
    admission = Admission(port=PORT, one_time_key="for-a-browser")

    assert ask(admission, "/?k=for-a-browser").status_code == 303
    assert ask(admission, "/?k=for-a-browser").status_code == 403
    assert ask(admission, f"/?k={admission.secret}").status_code == 303


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8123", "localhost:8123", "LOCALHOST:1", "[::1]:8123", "[::1]", "localhost"]
)
def test_names_of_loopback(host: str) -> None:
    """Every loopback name is accepted, at any port: tunnels change it, and rebinding needs a foreign name."""
    admission = Admission(port=PORT)

    assert ask(admission, host=host, Host=host, Cookie=cookie(admission)).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["127.0.0.2", "0", "[::ffff:127.0.0.1]", "[::2]", "localhost:", "localhost:x", "", "a b", "[", "é"],
)
def test_other_names(host: str) -> None:
    """No other name is accepted, however similar."""
    name = host_name(host.encode("latin-1"))

    assert name is None or name not in Admission(port=PORT).hosts


def test_allowed_name() -> None:
    """A name that the user allowed is accepted, but not a longer one."""
    admission = Admission(port=PORT, hosts=frozenset({"gpu7.example"}))

    assert ask(admission, Host="GPU7.example:80", Cookie=cookie(admission)).status_code == 200
    assert ask(admission, Host="x.gpu7.example", Cookie=cookie(admission)).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec_Fetch_Site": "same-origin", "Origin": "http://127.0.0.1:8123"},
        {"Origin": "HTTP://127.0.0.1:8123"},
        {"Content_Type": "application/json; charset=utf-8"},
    ],
)
def test_requests_of_the_page_are_forwarded(headers: Mapping[str, str]) -> None:
    """Requests of the page are forwarded unchanged, with or without Fetch metadata."""
    admission = Admission(port=PORT)
    usual = {"Cookie": cookie(admission), "X_Anybatch": "1", "Content_Type": "application/json"}
    answer = ask(admission, "/api/runs", method="POST", content=b'{"a": 1}', **{**usual, **headers})

    assert (answer.status_code, answer.text) == (200, '/api/runs {"a": 1}')
