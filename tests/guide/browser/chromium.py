"""The page in a real browser: served under the policy of the guide's server, or opened from a file, and watched."""

import functools
import http.server
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.guide.page import DIST, WEB

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types svelte-trusted-html"
)
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
SMALL: dict[str, Any] = {"viewport": {"width": 320, "height": 640}}


class Static(http.server.SimpleHTTPRequestHandler):
    """Serves the committed page as one without an engine, with the headers of the guide's server."""

    def do_GET(self) -> None:
        """Serve the page itself with another word in it, and other files as they are."""
        if urlsplit(self.path).path != "/":
            return super().do_GET()
        page = as_static((DIST / "index.html").read_text(encoding="utf-8")).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)
        return None

    def end_headers(self) -> None:
        """Add the policy."""
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Connection", "close")  # so that no thread waits for a browser that has gone
        super().end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@dataclass
class Watched:
    """A page, and all that went wrong on it."""

    page: Page
    context: BrowserContext
    origin: str
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def as_static(html: str) -> str:
    """Return the page as one without an engine behind it."""
    changed, places = re.subn(r'(<meta name="anybatch-guide" content=")live(")', r"\1static\2", html)
    assert places == 1
    return changed


@contextmanager
def served() -> Iterator[str]:
    """Serve the page; yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Static, directory=str(DIST)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def launched() -> Iterator[Browser]:
    """Start the system's Chromium, or skip and say what is missing."""
    program = os.environ.get("ANYBATCH_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(program).exists():
        pytest.skip(f"THE PAGE IS NOT TESTED: there is no Chromium at {program}; name one in ANYBATCH_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[Watched]:
    """Open the page and wait until it has come to life; whatever it complains of is kept."""
    context = browser.new_context(**options)
    page = context.new_page()
    watched = Watched(page, context, address)
    page.on("console", lambda message: watched.faults.extend([message.text] * (message.type == "error")))
    page.on("pageerror", lambda error: watched.faults.append(str(error)))
    page.on("request", lambda request: watched.requests.append(request.url))
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', e => console.error('policy: ' + e.violatedDirective))"
    )
    page.goto(address)
    if options.get("java_script_enabled", True):
        # the light can be chosen once the page is alive
        page.locator("select:enabled").first.wait_for()
        page.evaluate("document.fonts.ready.then(() => undefined)")
    try:
        yield watched
    finally:
        context.close()
