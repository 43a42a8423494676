"""The guide's first load: bytes before the first scroll, time until the page responds, and frame rate of a run.

Each page is served compressed, to Chromium on a phone's width whose processor and network Chromium slows down, with the
cache off. Pages alternate. "Readable" is the time until the text is drawn, "alive" the time until the slider of the
first screen can be moved. Frames are those drawn while a playground run streams into the page: nothing is slowed down,
and the engine runs on the same cores.

    python benchmarks/guide_first_load.py [DIST ...] [--rounds 7] [--frames] [--out benchmarks/results/NAME.md]
"""

import contextlib
import functools
import gzip
import http.server
import os
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from playwright.sync_api import Browser, CDPSession, Page

from anybatch_guide.export import DIST, export_folder

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from guide.tests.browser.chromium import DESKTOP, PHONE, launched
from guide.tests.served import Served

SLOWER = 4
NETWORK = {"offline": False, "latency": 150, "downloadThroughput": 1.6e6 / 8, "uploadThroughput": 0.75e6 / 8}
"""Slow 4G, as Lighthouse has it: 150 ms there and back, 1.6 Mbit/s."""
ALIVE = "() => document.querySelector('#top input[type=range]:enabled') && performance.now()"
KINDS = ("text", "script", "styles", "fonts", "recordings")
QUIET_MS = 4000
FRAMES = """seconds => new Promise(done => {
    const begin = performance.now();
    let frames = 0;
    const count = () => {
        frames += 1;
        const now = performance.now();
        if (now - begin < 1000 * seconds) requestAnimationFrame(count);
        else done(1000 * frames / (now - begin));
    };
    requestAnimationFrame(count);
})"""


class Compressed(http.server.SimpleHTTPRequestHandler):
    """Serve compressed files, as web servers do."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send a file."""
        path = Path(self.translate_path(self.path))
        file = path / "index.html" if path.is_dir() else path
        if not file.is_file():
            self.send_error(404)
            return
        packed = file.suffix != ".woff2"
        body = compressed(file) if packed else file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(file)))
        self.send_header("Content-Length", str(len(body)))
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@functools.cache
def compressed(file: Path) -> bytes:
    """Return the compressed content of a file."""
    return gzip.compress(file.read_bytes(), 9, mtime=0)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder; yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Compressed, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def kind(url: str) -> str:
    """Return the content type of a file, by its address."""
    path = url.partition("//")[2].partition("/")[2]
    if path.startswith("rec/"):
        return "recordings"
    return {"": "text", "js": "script", "css": "styles", "woff2": "fonts"}[path.rpartition(".")[2]]


def first_load(browser: Browser, address: str) -> dict[str, float]:
    """Open a page once on a slow machine and network; return bytes by kind and two times."""
    context = browser.new_context(**PHONE)
    page = context.new_page()
    session = context.new_cdp_session(page)
    found = bytes_by_kind(session)
    session.send("Network.emulateNetworkConditions", NETWORK)
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    session.send("Emulation.setCPUThrottlingRate", {"rate": SLOWER})
    page.goto(address, wait_until="commit")
    alive = page.wait_for_function(ALIVE, polling=20, timeout=120_000).json_value()
    page.wait_for_timeout(QUIET_MS)  # automatic requests, such as a font
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN")
    context.close()
    return {**found, "readable": painted / 1000, "alive": alive / 1000}


def bytes_by_kind(session: CDPSession) -> dict[str, float]:
    """Return a table of bytes by kind of content, which counts all bytes that arrive after this call."""
    found: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    addresses: dict[str, str] = {}

    def asked(event: dict[str, Any]) -> None:
        addresses[event["requestId"]] = event["request"]["url"]

    def arrived(event: dict[str, Any]) -> None:
        url = addresses.get(event["requestId"], "")
        if url.startswith("http"):
            found[kind(url)] += event["encodedDataLength"]

    session.on("Network.requestWillBeSent", asked)
    session.on("Network.loadingFinished", arrived)
    session.send("Network.enable")
    return found


def frames(browser: Browser, address: str, seconds: float) -> float:
    """Return the frames per second while a playground run streams into the page."""
    context = browser.new_context(**DESKTOP)
    page = context.new_page()
    page.goto(f"{address}#playground")
    part = page.locator("#playground")
    set_steps(page)
    part.get_by_role("button", name="Train", exact=True).click(timeout=120_000)
    part.locator("dl div", has_text="optimizer steps").locator("data", has_text=re.compile(r"[1-9]")).wait_for()
    rate: float = page.evaluate(FRAMES, seconds)
    context.close()
    return rate


def set_steps(page: Page) -> None:
    """Set a number of steps that outlasts the measurement."""
    page.evaluate("location.hash = 'playground?v=1&micro=16&accumulation=4&steps=900&seed=0&task=digits'")
    page.wait_for_timeout(1000)


def streaming(browser: Browser, rounds: int) -> list[float]:
    """Return the frames per second of some runs, each in its own server."""
    rates = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = (sys.executable, "-m", "anybatch", "guide", "--no-browser")
            with Served(Path(folder), command=command) as server:
                rates.append(frames(browser, server.address, 5.0))
    return rates


def main() -> None:
    """Measure, and print and write the table."""
    parser = report.parser(__doc__)
    parser.add_argument("dist", type=Path, nargs="*", default=[DIST], help="folders of built pages")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--frames", action="store_true", help="measure a run of the playground too")
    arguments = parser.parse_args()
    with launched() as browser, contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pages = [export_folder(dist, folder / str(number)) for number, dist in enumerate(arguments.dist)]
        addresses = [stack.enter_context(served(page)) for page in pages]
        runs: list[list[dict[str, float]]] = [[] for _ in addresses]
        for turn in range(arguments.rounds):
            for at in range(len(addresses)) if turn % 2 else reversed(range(len(addresses))):
                runs[at].append(first_load(browser, addresses[at]))
        rates = streaming(browser, 3) if arguments.frames else []
    rows = [
        "| page | text | script | styles | fonts | recordings | in all | readable after | alive after |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for dist, of in zip(arguments.dist, runs, strict=True):
        sizes = [statistics.median(one[name] for one in of) / 1000 for name in KINDS]
        cells = ["committed" if dist == DIST else dist.name, *(f"{size:.0f} kB" for size in (*sizes, sum(sizes)))]
        rows.append(f"| {' | '.join([*cells, spread('readable', of), spread('alive', of)])} |")
    if rates:
        rows += ["", f"Frames a second while a run streams: {', '.join(f'{rate:.0f}' for rate in rates)}."]
    busy = f"{os.getloadavg()[0]:.1f} processes wanted one of {os.cpu_count()} cores"
    report.publish(
        rows,
        title="The first load of the guide",
        command=f"python benchmarks/guide_first_load.py {' '.join(sys.argv[1:])}",
        setting=f"Chromium {SLOWER} times slower, 1.6 Mbit/s and 150 ms; {arguments.rounds} loads each; {busy}",
        out=arguments.out,
    )


def spread(name: str, runs: list[dict[str, float]]) -> str:
    """Return median and quartiles of a time."""
    low, middle, high = statistics.quantiles((one[name] for one in runs), n=4)
    return f"{middle:.2f} s ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
