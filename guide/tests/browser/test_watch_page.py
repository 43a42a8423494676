"""The page of `anybatch watch` in a browser: it follows growing logs, and never interprets them as markup."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from anybatch.cli.status import Status
from anybatch_guide.watch import command
from guide.tests.browser.chromium import CLIPPED, DESKTOP, PHONE, Watched, opened
from guide.tests.hostile_logs import hostile_logs, line, span, start, step
from guide.tests.served import Served

WATCH = (
    sys.executable,
    "-c",
    "import sys; from anybatch_guide.watch.command import run; run(sys.argv[1:])",
    "--no-browser",
)
AMISS = "This part of the log could not be drawn"


def grown(path: Path, *lines: bytes) -> None:
    """Append to a log."""
    with path.open("ab") as file:
        file.write(b"".join(lines))


def one_step(number: int, loss: float, rank: int) -> bytes:
    """Return the lines of a step of a rank that waits for a sum."""
    now = 2.0 + number
    spans = [span(event, now + at, number, "reduce") for event, at in (("begin", 0.1 + rank / 10), ("end", 0.4))]
    return b"".join((*spans, step(number, loss, now + 0.5)))


@pytest.fixture
def two_ranks(tmp_path: Path) -> tuple[Path, Callable[[int, float], None]]:
    """Return the folder of a run of two ranks, and a function that writes a step."""
    logs = [tmp_path / "live" / name for name in ("events.jsonl", "events-rank-1.jsonl")]
    logs[0].parent.mkdir()
    for rank, log in enumerate(logs):
        grown(log, start(rank=rank, world_size=2))

    def make(number: int, loss: float) -> None:
        for rank, log in enumerate(logs):
            grown(log, one_step(number, loss, rank))

    return logs[0].parent, make


def test_it_follows_two_ranks(
    browser: Browser, two_ranks: tuple[Path, Callable[[int, float], None]], tmp_path: Path
) -> None:
    """Logged steps appear, incomplete lines do not, lanes have a row per rank, and the end is shown."""
    folder, make = two_ranks
    make(0, 2.5)
    with (
        Served(tmp_path, command=(*WATCH, str(folder))) as server,
        opened(browser, server.address, **DESKTOP) as watched,
    ):
        row = watched.page.locator("main li").first
        expect(row).to_contain_text("running")
        expect(row.locator("dd").nth(1)).to_have_text("2.500")
        for number in range(1, 4):
            make(number, 2.5 - number / 10)
        expect(row.locator("dd").nth(1)).to_have_text("2.200")
        lanes = watched.page.get_by_role("img", name="Step 3 of 2 ranks")
        expect(lanes.first.locator("rect.reduce")).to_have_count(2)
        whole = one_step(4, 1.25, 0)
        grown(folder / "events.jsonl", whole[:-9])
        grown(folder / "events-rank-1.jsonl", line("diagnosis", rank=1, step=3, level="info", message="looked again"))
        expect(watched.page.get_by_text("looked again")).to_be_visible()
        expect(row.locator("dd").nth(0)).to_have_text("3")
        grown(
            folder / "events.jsonl", whole[-9:], line("end", status="completed", num_steps=5, message=None, digest=None)
        )
        expect(row).to_contain_text("completed")
        expect(row.locator("dd").nth(1)).to_have_text("1.250")

        assert watched.faults == []
        assert all(url.startswith((f"http://{server.host}/", "data:")) for url in watched.requests)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of all hostile logs to a file."""
    folder = tmp_path_factory.mktemp("hostile")
    for name, content in hostile_logs():
        run = folder / f"<img src=x onerror=hurt()> {name}".replace("/", " ")
        run.mkdir()
        (run / "events.jsonl").write_bytes(content)
    file = folder / "page.html"
    assert command.run([str(folder), "--export", str(file)]) == Status.DONE
    return file


@pytest.fixture
def page(browser: Browser, hostile: Path) -> Iterator[Watched]:
    """Open that page, and afterwards check that it made no requests."""
    with opened(browser, hostile.as_uri(), **PHONE) as watched:
        yield watched
        assert [url for url in watched.requests if not url.startswith("data:")] == [hostile.as_uri()]


def test_hostile_logs_stay_text(page: Watched) -> None:
    """For each hostile run: no injected element, no script, all parts drawn, no text cut off."""
    rows = page.page.locator("main li .name")
    assert rows.count() == len(list(hostile_logs()))
    for at in range(rows.count()):
        rows.nth(at).click()
        for scale in ("logarithmic", "linear"):
            page.page.get_by_label(scale).check(force=True)
        assert page.page.locator("img, iframe, object, script[src]").count() == 0
        assert AMISS not in page.page.locator("main").inner_text(), rows.nth(at).inner_text()
        assert page.page.evaluate(CLIPPED) == []
    assert page.page.evaluate("window.hurt") is None
    assert page.faults == []
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no text widens a phone's page"
