"""A page in a real browser, with a record of its requests and errors."""

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright

from guide.tests.page import WEB

AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
AXE_RUN = """async ([rules, within]) => {
    const which = rules ? {runOnly: {type: 'rule', values: rules}} : {};
    return (await axe.run(within ?? document, {resultTypes: ['violations'], ...which})).violations
        .map(found => found.id + ': ' + found.nodes.slice(0, 3).map(node => node.target.join(' ')).join(' | '))
}"""
ALIVE = "select:enabled"  # enabled once the page is hydrated
DESKTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
SMALL: dict[str, Any] = {"viewport": {"width": 320, "height": 640}}
UNUSED = (
    *("WebUIOmniboxPopup", "WebUIOmniboxAimPopup"),  # two of the browser's internal pages, created with every window
    *("AimEnabled", "MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding"),
    *("LensOverlay", "PreconnectToSearch"),
)
"""Browser features to disable: these take a quarter of a page's opening time. Replaces Playwright's own list."""

ORPHANS = """main => {
    const walker = document.createTreeWalker(main, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) {
        const text = walker.currentNode, element = text.parentElement;
        const free = element.closest('[data-from], code, pre, math, nav');
        if (/\\d/.test(text.data) && !free) found.push(text.data.trim());
    }
    return found;
}"""
CLIPPED = """() => {
    const SIDEWAYS = 'pre, code, td, th, math, [data-line]';  // may be moved into view
    const walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    const range = document.createRange(), found = [];
    while (walker.nextNode()) {
        const text = walker.currentNode, own = text.parentElement;
        if (!text.data.trim() || !own.checkVisibility() || own.closest('.unseen, svg')) continue;
        range.selectNodeContents(text);
        const places = [...range.getClientRects()];
        for (let box = own; box.tagName !== 'MAIN'; box = box.parentElement) {
            const {overflowX, overflowY} = getComputedStyle(box), room = box.getBoundingClientRect();
            if (overflowX === 'auto' && own.closest(SIDEWAYS)) break;
            const across = overflowX !== 'visible';
            const down = ['hidden', 'clip'].includes(overflowY);
            const cut = place => (across && (place.left < room.left - 1 || place.right > room.right + 1))
                || (down && (place.top < room.top - 1 || place.bottom > room.bottom + 1));
            if (places.some(cut)) { found.push(text.data.trim()); break; }
        }
    }
    return found;
}"""
"""Texts that their containers cut off, except scrollable ones such as tables."""


class Files(http.server.SimpleHTTPRequestHandler):
    """A plain web server without policy headers: the only policy is in the page."""

    def end_headers(self) -> None:
        """Close the connection, so that no thread waits for a closed browser."""
        self.send_header("Connection", "close")
        super().end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@dataclass
class Watched:
    """A page with its errors and requests."""

    page: Page
    context: BrowserContext
    origin: str
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def absent(message: str) -> None:
    """Skip a test without a system requirement, or fail if it was installed on purpose."""
    if os.environ.get("ANYBATCH_BROWSER") == "required":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def launched() -> Iterator[Browser]:
    """Start the system's Chromium, or report it as missing."""
    program = os.environ.get("ANYBATCH_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(program).exists():
        absent(f"THE PAGE IS NOT TESTED: Chromium is missing at {program}; `make browser` installs it")
    with sync_playwright() as playwright:
        options = ["--no-sandbox", f"--disable-features={','.join(UNUSED)}"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, address: str, ready: str = ALIVE, **options: Any) -> Iterator[Watched]:
    """Open the page, wait for hydration, and record its errors and requests.

    Args:
        browser: the browser.
        address: of the page.
        ready: selector of an element that a hydrated page has; ignored without scripts.
        options: of the browser's context.
    """
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
        page.locator(ready).first.wait_for()
        page.evaluate("document.fonts.ready.then(() => undefined)")
    try:
        yield watched
    finally:
        context.close()


def scroll_through(page: Page) -> None:
    """Bring every part of the page into view once."""
    page.evaluate("""async () => {
        for (let place = 0; place < document.body.scrollHeight; place += innerHeight) {
            scrollTo({top: place, behavior: "instant"});
            await new Promise(requestAnimationFrame);
        }
    }""")


@contextmanager
def unfolded(page: Page) -> Iterator[None]:
    """Open every fold and draw all sections; restore both afterwards."""
    page.evaluate("""async () => {
        document.querySelectorAll('main details').forEach(fold => fold.open = true);
        document.querySelectorAll('main section').forEach(part => part.style.contentVisibility = 'visible');
        for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
    }""")
    try:
        yield
    finally:
        page.evaluate("""() => {
            document.querySelectorAll('main details').forEach(fold => fold.open = false);
            document.querySelectorAll('main section').forEach(part => part.style.contentVisibility = '');
        }""")


def bring_to_life(page: Page) -> None:
    """Scroll every part into view once, including folds, and wait for hydration."""
    folds = page.locator("main details.deeper")
    folds.evaluate_all("folds => folds.forEach(fold => fold.open = true)")
    # One call, as a call per part takes twice the time.
    page.evaluate("""async () => {
        for (const part of document.querySelectorAll('[data-later]')) {
            part.scrollIntoView({block: 'center', behavior: 'instant'});
            await new Promise(done => requestAnimationFrame(() => setTimeout(done)));  // until it has been drawn
        }
    }""")
    expect(page.locator("[data-later=waiting]")).to_have_count(0)
    folds.evaluate_all("folds => folds.forEach(fold => fold.open = false)")


def come_to(page: Page, part: str) -> Locator:
    """Scroll a part of the page into view, and return it when it is hydrated."""
    place = page.locator(f"#{part}")
    place.scroll_into_view_if_needed()
    expect(place.locator("[data-later]").first).to_have_attribute("data-later", "alive")
    return place
