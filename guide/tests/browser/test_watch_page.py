"""The page of `anybatch watch` in a browser: it follows growing logs, and never interprets them as markup."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, expect

from anybatch.cli.status import Status
from anybatch_guide.watch import command
from guide.tests.browser.chromium import AXE, AXE_RUN, CLIPPED, DESKTOP, PHONE, Watched, absent, opened
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
        row = watched.page.locator("main tbody tr").first
        expect(row).to_contain_text("running")
        expect(row.locator(".metric .number")).to_have_text("2.500")
        for number in range(1, 4):
            make(number, 2.5 - number / 10)
        expect(row.locator(".metric .number")).to_have_text("2.200")
        row.get_by_role("link", name="live").click()
        watched.page.get_by_label("title").fill("two ranks")
        watched.page.get_by_role("button", name="Save").click()
        expect(watched.page.get_by_text("Saved.")).to_be_visible()
        lanes = watched.page.get_by_role("img", name="Step 4 of 2 ranks")
        expect(lanes.first.locator("rect.reduce")).to_have_count(2)
        whole = one_step(4, 1.25, 0)
        grown(folder / "events.jsonl", whole[:-9])
        grown(folder / "events-rank-1.jsonl", line("diagnosis", rank=1, step=3, level="info", message="looked again"))
        expect(watched.page.get_by_text("looked again")).to_be_visible()
        watched.page.go_back()
        expect(row).to_contain_text("two ranks")
        expect(row.locator("td.number").nth(0)).to_have_text("4")
        grown(
            folder / "events.jsonl", whole[-9:], line("end", status="completed", num_steps=5, message=None, digest=None)
        )
        expect(row).to_contain_text("completed")
        expect(row.locator(".metric .number")).to_have_text("1.250")

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
    rows = page.page.locator("main tbody .name")
    assert rows.count() == len(list(hostile_logs()))
    for at in range(rows.count()):
        rows.nth(at).click()
        expect(page.page.get_by_role("link", name="All runs")).to_be_visible()  # the run's page, not the table's chart
        for scale in ("logarithmic", "linear"):
            # Not at coordinates: a page of a run scrolls to its top when it opens.
            page.page.get_by_label(scale).dispatch_event("click")
            expect(page.page.get_by_label(scale)).to_be_checked()
        assert page.page.locator("img, iframe, object, script[src]").count() == 0
        assert AMISS not in page.page.locator("main").inner_text(), rows.nth(at).inner_text()
        assert page.page.evaluate(CLIPPED) == []
        page.page.get_by_role("link", name="All runs").click()
    assert page.page.evaluate("window.hurt") is None
    assert page.faults == []
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no text widens a phone's page"


@pytest.fixture
def run_folders(tmp_path: Path) -> list[str]:
    """Write three runs: a calm one, one with another batch, and one that diverges; return the arguments of watch."""
    folder = tmp_path / "runs"
    losses = {
        "calm": [2.0 / n for n in range(1, 41)],
        "small": [1.9 / n for n in range(1, 41)],
        "lost": [2.0**n for n in range(40)],
    }
    for name, values in losses.items():
        run = folder / name
        run.mkdir(parents=True)
        first = start(decisions={"batch": name, "seed": "0"})
        (run / "events.jsonl").write_bytes(
            first + b"".join(step(n, loss, 2.0 + n) for n, loss in enumerate(values)) + line("end", status="completed")
        )
    return [str(folder / "calm"), str(folder)]


@pytest.fixture
def different_runs(run_folders: list[str], tmp_path: Path) -> Path:
    """Write the page of these runs."""
    file = tmp_path / "page.html"
    assert command.run([*run_folders, "--export", str(file)]) == Status.DONE
    return file


def test_runs_are_compared(browser: Browser, different_runs: Path) -> None:
    """Different settings and divergence are marked, and the table is sorted, filtered and downloaded as shown."""
    with opened(browser, different_runs.as_uri(), **DESKTOP) as watched:
        page = watched.page
        rows = page.locator("main tbody tr")
        expect(page.get_by_role("row", name="lost")).to_contain_text("completed, diverged")
        expect(page.locator("thead th").last).to_contain_text("batch")
        assert page.locator("td.different").count() == 2
        expect(page.get_by_text("Values outside of the chart: lost")).to_be_visible()
        page.locator("thead").get_by_role("button", name="run").click()
        assert rows.locator(".name").all_inner_texts() == ["calm", "lost", "small"]
        page.get_by_label("filter").fill("batch=small")
        expect(rows).to_have_count(1)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download table").click()
        content = Path(download.value.path()).read_text(encoding="utf-8")
        assert content.splitlines()[1].startswith("small,completed,0.0475,40,")
        assert watched.faults == []


def test_a_run_has_an_address(browser: Browser, different_runs: Path) -> None:
    """A run's address opens its page at the top; dragging over the chart zooms, and a button shows all again."""
    with opened(browser, f"{different_runs.as_uri()}#/run/small", **DESKTOP) as watched:
        page = watched.page
        expect(page.get_by_role("heading", level=1)).to_have_text("small")
        chart = page.get_by_role("slider", name="loss of the runs")
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 200, box["y"] + 100)
        page.mouse.down()
        page.mouse.move(box["x"] + 500, box["y"] + 100)
        page.mouse.up()
        page.get_by_role("button", name="Show all").click()
        expect(page.get_by_role("button", name="Show all")).to_have_count(0)
        page.get_by_label("some").dispatch_event("click")
        assert chart.locator(".pale").count() == 1
        page.get_by_role("link", name="All runs").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("3 runs")
        assert watched.faults == []


def test_the_chart_is_zoomed_by_keys(browser: Browser, different_runs: Path) -> None:
    """The keys + and - zoom about the cursor, 0 shows all, and a live region names the range."""
    with opened(browser, f"{different_runs.as_uri()}#/run/small", **DESKTOP) as watched:
        page = watched.page
        chart = page.get_by_role("slider", name="loss of the runs")
        shown = page.get_by_role("status", name="Range of the chart")
        expect(shown).to_contain_text("the whole run")
        chart.focus()
        for key in ("Home", "PageUp", "PageUp", "+"):
            chart.press(key)
        expect(chart).to_have_attribute("aria-valuetext", re.compile("^step 9:"))
        expect(shown).to_have_text("steps 5 to 25")
        chart.press("+")
        expect(shown).to_have_text("steps 7 to 17")
        chart.press("-")
        expect(shown).to_have_text("steps 5 to 25")
        chart.press("0")
        expect(shown).to_contain_text("the whole run")
        expect(chart).to_have_attribute("aria-valuetext", re.compile("^step 9:"))
        assert watched.faults == []


@pytest.mark.parametrize("device", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_is_accessible(browser: Browser, run_folders: list[str], tmp_path: Path, device: dict[str, Any]) -> None:
    """Axe finds no violations on the overview, and on the page of a run with the form for notes, in light and dark."""
    if not AXE.exists():
        absent(f"ACCESSIBILITY IS NOT TESTED: {AXE} is missing; `make browser` installs it if npm is available")
    with (
        Served(tmp_path, command=(*WATCH, *run_folders)) as server,
        opened(browser, server.address, **device, reduced_motion="reduce") as watched,
    ):
        page = watched.page
        expect(page.locator("main tbody .chip")).to_have_count(3)
        page.evaluate(AXE.read_text(encoding="utf-8"))
        schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
        for scheme in schemes:
            page.emulate_media(color_scheme=scheme)
            for name in ("calm", "lost"):
                assert page.evaluate(AXE_RUN, [None, None]) == []
                page.get_by_role("link", name=name).click()
                page.get_by_label("note").fill("a note")
                assert page.evaluate(AXE_RUN, [None, None]) == []
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                page.go_back()
        assert watched.faults == []
