"""Access control of the guide: checks every request, and sets the headers of every response.

Listening only on loopback does not protect the server: any web page and every user of the machine can send requests
to it. The checks, in this order: the host name (another name indicates DNS rebinding), the page that sent the request
(Fetch metadata, Origin), the method, and a secret that only the terminal showed. Requests that change something also
need a header that no HTML form can send, and their body is limited in size and time.
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
_SINGLE_HEADERS: Final = (b"origin", b"sec-fetch-site", b"content-type", b"content-length", b"x-anybatch")
_MAX_QUERY_BYTES: Final = 256


@dataclass(slots=True, kw_only=True)
class Admission:
    """The conditions under which a request is admitted."""

    port: int  # port of the server; part of the cookie's name, because browsers share cookies between a host's ports
    # accepted host names. Any port is accepted: tunnels change it, and DNS rebinding is recognised by the name
    hosts: frozenset[str] = LOOPBACK_NAMES
    # the secret in the printed address, and later in the cookie
    secret: str = field(default_factory=secrets.token_urlsafe, repr=False)
    # a single-use secret for the browser that the guide starts, because other users can see the browser's arguments
    one_time_key: str | None = field(default=None, repr=False)

    @property
    def cookie_name(self) -> str:
        """The name of the cookie."""
        return f"anybatch-{self.port}"

    def accepts_key(self, key: str) -> bool:
        """Return whether an address with this key is accepted."""
        if self.one_time_key is not None and secrets.compare_digest(key.encode(), self.one_time_key.encode()):
            # Single use, because other users of the machine can read the address that a browser was started with.
            self.one_time_key = None
            return True
        return secrets.compare_digest(key.encode(), self.secret.encode())

    def accepts_cookies(self, cookies: Iterable[bytes]) -> bool:
        """Return whether one of the Cookie headers contains the secret of this server."""
        pairs = [pair.strip().partition(b"=") for header in cookies for pair in header.split(b";")]
        values = [value for name, _, value in pairs if name == self.cookie_name.encode()]
        # Compare in constant time, so that the duration does not reveal how much of a guess is correct.
        return any(secrets.compare_digest(value, self.secret.encode()) for value in values)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response of the guard: an error, or a redirect to the page."""

    status: HTTPStatus
    code: str
    message: str
    headers: tuple[Header, ...] = ()

    async def send(self, send: Send) -> None:
        """Send the response as JSON, and close the connection without reading the rest of the request."""
        body = json.dumps({"code": self.code, "message": self.message}).encode()
        entity_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers = [*entity_headers, (b"connection", b"close"), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Guard:
    """The outermost application: refuses invalid requests, and forwards valid ones."""

    def __init__(self, app: App, admission: Admission, limits: Limits) -> None:
        self._app = app
        self._admission = admission
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection of the server."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            # WebSockets are not used, and browsers do not restrict them to the origin of a page.
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
            # The body was read here, but the application has to read it too.
            receive = _replay(body, receive)
        await self._app(scope, receive, send)

    def _answer(self, request: "_Request") -> Answer | None:
        """Return an error or a redirect; None to accept the request, whose body is checked later."""
        for check in (_check_host, _check_origin, _check_method, _check_secret, _check_form):
            answer = check(request, self._admission, self._limits)
            if answer is not None:
                return answer
        return None

    async def _body(self, receive: Receive) -> bytes | Answer:
        """Return the complete body, or an error; the client's Content-Length is not trusted."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if message["type"] == "http.disconnect":
                        return Answer(HTTPStatus.BAD_REQUEST, "gone", "The connection ended within the body.")
                    if len(body) > self._limits.body_bytes:
                        return _too_large(self._limits)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message_text = f"The body took more than {self._limits.body_seconds:g} seconds."
            return Answer(HTTPStatus.REQUEST_TIMEOUT, "slow", message_text)


class _Request:
    """The parts of a request that the guard checks.

    Paths come from the scope, because a reconstructed URL would depend on the Host header.
    """

    def __init__(self, scope: Scope) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self._headers: list[Header] = [(name.lower(), value) for name, value in scope["headers"]]

    def all(self, name: bytes) -> list[bytes]:
        """Return every value of a header."""
        return [value for key, value in self._headers if key == name]

    def first(self, name: bytes) -> bytes | None:
        """Return the first value of a header; None if it is missing."""
        return next(iter(self.all(name)), None)


def host_name(host: bytes) -> str | None:
    """Return the name or address in a Host header, in lower case; None if the header is malformed."""
    # latin-1 decodes every byte, so a malformed header is refused and raises no error.
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return None if match is None else match.group(1) or match.group(2)


def _check_host(request: _Request, admission: Admission, _limits: Limits) -> Answer | None:
    hosts = request.all(b"host")
    if len(hosts) != 1 or host_name(hosts[0]) not in admission.hosts:
        message = "Unknown host name; this server accepts: " + ", ".join(sorted(admission.hosts))
        return Answer(HTTPStatus.MISDIRECTED_REQUEST, "host", message)
    if request.all(b"upgrade"):
        return Answer(HTTPStatus.BAD_REQUEST, "upgrade", "Protocol upgrades are not supported.")
    # If a header has two values, the guard and the application could use different ones.
    if any(len(request.all(name)) > 1 for name in _SINGLE_HEADERS):
        return Answer(HTTPStatus.BAD_REQUEST, "headers", "A header that may occur only once is present twice.")
    return None


def _check_origin(request: _Request, _admission: Admission, _limits: Limits) -> Answer | None:
    site = request.first(b"sec-fetch-site")
    # A typed address has no requesting site; only the page may be opened like this.
    is_page = request.path == "/" and request.first(b"sec-fetch-dest") in (None, b"document")
    if site not in (None, b"same-origin") and not (site == b"none" and is_page):
        message = "Another page sent this request. Open the guide with its printed address, in the address bar."
        return Answer(HTTPStatus.FORBIDDEN, "site", message)
    # Browsers without Fetch metadata still send an Origin with POST and DELETE requests.
    origin, host = request.first(b"origin"), request.first(b"host")
    if origin is not None and origin.lower() != b"http://" + (host or b"").lower():
        return Answer(HTTPStatus.FORBIDDEN, "origin", "Another page sent this request.")
    return None


def _check_method(request: _Request, _admission: Admission, _limits: Limits) -> Answer | None:
    api = request.path.startswith("/api/")
    allowed = (*_READING, *_CHANGING) if api else _READING
    if request.method in allowed:
        return None
    headers = ((b"allow", ", ".join(allowed).encode()),)
    return Answer(HTTPStatus.METHOD_NOT_ALLOWED, "method", f"The method {request.method} is not supported.", headers)


def _check_secret(request: _Request, admission: Admission, _limits: Limits) -> Answer | None:
    key = _launch_key(request)
    if key is not None and admission.accepts_key(key):
        cookie = f"{admission.cookie_name}={admission.secret}; HttpOnly; SameSite=Strict; Path=/"
        # Redirect, so that the secret does not stay in the address bar.
        headers = ((b"location", b"/"), (b"set-cookie", cookie.encode()))
        return Answer(HTTPStatus.SEE_OTHER, "welcome", "The page is at /.", headers)
    # A wrong key in the address is refused, even from a browser that has the cookie.
    if key is None and admission.accepts_cookies(request.all(b"cookie")):
        return None
    message = "Use the complete address from the terminal, including the part after the question mark."
    return Answer(HTTPStatus.FORBIDDEN, "secret", message)


def _launch_key(request: _Request) -> str | None:
    """Return the key in the address, or None."""
    if request.path != "/" or request.method != "GET" or not 0 < len(request.query) <= _MAX_QUERY_BYTES:
        return None
    return next(iter(parse_qs(request.query.decode("latin-1")).get("k", [])), None)


def _check_form(request: _Request, _admission: Admission, limits: Limits) -> Answer | None:
    if request.method not in _CHANGING:
        return None
    # Another page cannot set this header without a preflight request, which the guard always refuses.
    if request.first(b"x-anybatch") != b"1":
        return Answer(HTTPStatus.FORBIDDEN, "header", "A change needs the header X-Anybatch: 1.")
    media_type = (request.first(b"content-type") or b"").partition(b";")[0].strip().lower()
    # A DELETE without a body has no content type.
    if media_type != b"application/json" and not (request.method == "DELETE" and not media_type):
        return Answer(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "type", "The body must be application/json.")
    length = request.first(b"content-length")
    # Truncate first, because converting thousands of digits is slow.
    if length is not None and (not length.isdigit() or int(length[:20]) > limits.body_bytes):
        return _too_large(limits)
    return None


def _too_large(limits: Limits) -> Answer:
    return Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "size", f"The body has more than {limits.body_bytes} bytes.")


def _with_headers(send: Send) -> Send:
    """Return a `send` that sets the guide's headers in every response, replacing existing ones."""
    names = {name for name, _ in HEADERS}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            other_headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() not in names]
            message = {**message, "headers": [*other_headers, *HEADERS]}
        await send(message)

    return send_with_headers


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns the body that was already read, and then calls the original."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again
