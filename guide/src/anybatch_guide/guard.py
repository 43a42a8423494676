"""Who may talk to the guide: every request passes here first, and every response gets its headers here.

Loopback is no wall: any page that the user visits can send requests to it, and so can every user of the machine. What
stands in the way, in this order: the name it was asked by (a foreign one is DNS rebinding), which page asks (Fetch
metadata, Origin), no permission for anybody to read across origins, a secret that only the terminal has shown, and for
whatever changes something a form that no HTML form can send, of limited size and within limited time.
"""

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qs

from anybatch_guide.limits import Limits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types svelte-trusted-html"
)
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_READING, _CHANGING = ("GET", "HEAD"), ("POST", "DELETE")
_HOST: Final = re.compile(r"(?:\[([0-9a-f:]{2,45})\]|([a-z0-9.-]{1,253}))(?::[0-9]{1,5})?")
_ONLY_ONCE: Final = (b"origin", b"sec-fetch-site", b"content-type", b"content-length", b"x-anybatch")
_MAX_QUERY_BYTES: Final = 256


@dataclass(slots=True, kw_only=True)
class Admission:
    """The conditions under which a request is admitted.

    Attributes:
        port: the server's; cookies know no ports, so theirs stands in the cookie's name.
        hosts: names by which the server may be asked. Any port will do: tunnels change it, and rebinding needs a name.
        secret: what the printed address carries, and later the cookie.
        once: another secret that lets one browser in, once; what a program is started with, others may see.
    """

    port: int
    hosts: frozenset[str] = LOOPBACK_NAMES
    secret: str = field(default_factory=secrets.token_urlsafe, repr=False)
    once: str | None = field(default=None, repr=False)

    @property
    def cookie_name(self) -> str:
        """The name of the cookie."""
        return f"anybatch-{self.port}"

    def launches(self, key: str) -> bool:
        """Return whether an address with this key lets a browser in."""
        if self.once is not None and secrets.compare_digest(key.encode(), self.once.encode()):
            # Used up: other users of the machine can read with what address a browser was started.
            self.once = None
            return True
        return secrets.compare_digest(key.encode(), self.secret.encode())

    def admits(self, cookies: Iterable[bytes]) -> bool:
        """Return whether one of the Cookie headers holds the secret under this server's name."""
        pairs = [pair.strip().partition(b"=") for header in cookies for pair in header.split(b";")]
        values = [value for name, _, value in pairs if name == self.cookie_name.encode()]
        # In constant time, so that the duration does not tell how much of a guess was right.
        return any(secrets.compare_digest(value, self.secret.encode()) for value in values)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the guard itself: a refusal, or the way to the page."""

    status: HTTPStatus
    code: str
    message: str
    headers: tuple[Header, ...] = ()

    async def send(self, send: Send) -> None:
        """Send it as JSON, and end the connection: whatever else was sent on it is not read."""
        body = json.dumps({"code": self.code, "message": self.message}).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers = [*own, (b"connection", b"close"), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Guard:
    """The outermost application: answers what may not pass, and passes on the rest.

    Args:
        app: what is guarded.
        admission: what lets a request in.
        limits: how large and how slow a body may be.
    """

    def __init__(self, app: App, admission: Admission, limits: Limits) -> None:
        self._app = app
        self._admission = admission
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection of the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # Nothing here speaks WebSocket, which browsers do not bind to the origin of a page.
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, _with_headers(send))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(_Request(scope))
        if answer is not None:
            await answer.send(send)
            return
        if scope["method"] in _CHANGING:
            body = await self._body(receive)
            if isinstance(body, Answer):
                await body.send(send)
                return
            # The body has been read here, and the application reads it as well.
            receive = _replayed(body, receive)
        await self._app(scope, receive, send)

    def _answer(self, request: "_Request") -> Answer | None:
        """Return what there is to say without looking at the body; None to let it pass."""
        for look in (
            _look_at_host,
            _look_at_origin,
            _look_at_method,
            _look_at_secret,
            _look_at_form,
        ):
            answer = look(request, self._admission, self._limits)
            if answer is not None:
                return answer
        return None

    async def _body(self, receive: Receive) -> bytes | Answer:
        """Return a body, read as a whole; what the client says of its length is not believed."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if message["type"] == "http.disconnect":
                        return Answer(HTTPStatus.BAD_REQUEST, "gone", "The connection ended inside the body.")
                    if len(body) > self._limits.body_bytes:
                        return _too_large(self._limits)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message_text = f"The body took more than {self._limits.body_seconds:g} seconds."
            return Answer(HTTPStatus.REQUEST_TIMEOUT, "slow", message_text)


class _Request:
    """The parts of a request that the guard checks.

    Paths come from the scope: a URL put together again would depend on the Host header.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self._headers: list[Header] = [(name.lower(), value) for name, value in scope["headers"]]

    def all(self, name: bytes) -> list[bytes]:
        """Return every value of a header."""
        return [value for found, value in self._headers if found == name]

    def one(self, name: bytes) -> bytes | None:
        """Return the first value of a header; None if it is not there."""
        return next(iter(self.all(name)), None)


def host_name(host: bytes) -> str | None:
    """Return the name or address in a Host header, in lower case; None if it is neither."""
    # latin-1 decodes every byte, so a malformed header is refused instead of an error.
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return None if match is None else match.group(1) or match.group(2)


def _look_at_host(request: _Request, admission: Admission, _limits: Limits) -> Answer | None:
    hosts = request.all(b"host")
    if len(hosts) != 1 or host_name(hosts[0]) not in admission.hosts:
        message = "This server is asked by another name than its own; it answers to: " + ", ".join(
            sorted(admission.hosts)
        )
        return Answer(HTTPStatus.MISDIRECTED_REQUEST, "host", message)
    if request.all(b"upgrade"):
        return Answer(HTTPStatus.BAD_REQUEST, "upgrade", "No other protocol is spoken here.")
    # With two values, this check and the application could go by different ones.
    if any(len(request.all(name)) > 1 for name in _ONLY_ONCE):
        return Answer(HTTPStatus.BAD_REQUEST, "headers", "A header that may stand once stands twice.")
    return None


def _look_at_origin(request: _Request, _admission: Admission, _limits: Limits) -> Answer | None:
    site = request.one(b"sec-fetch-site")
    # A typed address has no site that asks; only the page itself may be opened in that way.
    is_page = request.path == "/" and request.one(b"sec-fetch-dest") in (None, b"document")
    if site not in (None, b"same-origin") and not (site == b"none" and is_page):
        message = "Another page asked for this. Open the guide by its printed address, in the address bar."
        return Answer(HTTPStatus.FORBIDDEN, "site", message)
    # Browsers without Fetch metadata still send an Origin with whatever changes something.
    origin, host = request.one(b"origin"), request.one(b"host")
    if origin is not None and origin.lower() != b"http://" + (host or b"").lower():
        return Answer(HTTPStatus.FORBIDDEN, "origin", "Another page asked for this.")
    return None


def _look_at_method(request: _Request, _admission: Admission, _limits: Limits) -> Answer | None:
    api = request.path.startswith("/api/")
    allowed = (*_READING, *_CHANGING) if api else _READING
    if request.method in allowed:
        return None
    headers = ((b"allow", ", ".join(allowed).encode()),)
    return Answer(
        HTTPStatus.METHOD_NOT_ALLOWED, "method", f"{request.method} is nothing that can be done here.", headers
    )


def _look_at_secret(request: _Request, admission: Admission, _limits: Limits) -> Answer | None:
    key = _launch_key(request)
    if key is not None and admission.launches(key):
        cookie = f"{admission.cookie_name}={admission.secret}; HttpOnly; SameSite=Strict; Path=/"
        # By a redirect, so that the secret does not stay in the address bar.
        headers = ((b"location", b"/"), (b"set-cookie", cookie.encode()))
        return Answer(HTTPStatus.SEE_OTHER, "welcome", "The page is at /.", headers)
    # A wrong key in the address is refused, even from a browser that has the cookie.
    if key is None and admission.admits(request.all(b"cookie")):
        return None
    message = "This needs the address that was printed in the terminal, with all that is behind the question mark."
    return Answer(HTTPStatus.FORBIDDEN, "secret", message)


def _launch_key(request: _Request) -> str | None:
    """Return what stands in the address as a key; None if there is nothing of that kind."""
    if request.path != "/" or request.method != "GET" or not 0 < len(request.query) <= _MAX_QUERY_BYTES:
        return None
    return next(iter(parse_qs(request.query.decode("latin-1")).get("k", [])), None)


def _look_at_form(request: _Request, _admission: Admission, limits: Limits) -> Answer | None:
    if request.method not in _CHANGING:
        return None
    # A foreign page cannot set this header without a preflight request, which is never granted here.
    if request.one(b"x-anybatch") != b"1":
        return Answer(HTTPStatus.FORBIDDEN, "header", "A change needs the header X-Anybatch: 1.")
    media_type = (request.one(b"content-type") or b"").partition(b";")[0].strip().lower()
    # A DELETE may come without a body, which then has no type.
    if media_type != b"application/json" and not (request.method == "DELETE" and not media_type):
        return Answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "type", "A body has to be application/json.")
    length = request.one(b"content-length")
    # Cut first: converting thousands of digits would take long.
    if length is not None and (not length.isdigit() or int(length[:20]) > limits.body_bytes):
        return _too_large(limits)
    return None


def _too_large(limits: Limits) -> Answer:
    return Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "size", f"A body has at most {limits.body_bytes} bytes.")


def _with_headers(send: Send) -> Send:
    """Return a `send` that adds the guide's headers to every response, in place of what the response says of them."""
    names = {name for name, _ in HEADERS}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in names]
            message = {**message, "headers": [*own, *HEADERS]}
        await send(message)

    return send_with_headers


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read before, and then whatever comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again
