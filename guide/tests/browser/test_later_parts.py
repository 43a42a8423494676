"""Parts hydrated near the screen fetch their data on demand and work."""

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from guide.tests.browser.chromium import DESKTOP, PHONE, Watched, bring_to_life, opened
from guide.tests.recorded_again import RECORDINGS

PARTS = {
    "devices": "ddp_timeline",
    "batch-size": "rates_by_batch",
    "lengths": "length_cuts",
    "why-wrong": "wrong_losses",
}


@pytest.fixture(scope="module")
def alive(browser: Browser, address: str) -> Iterator[Watched]:
    """A fully hydrated page."""
    with opened(browser, address, **DESKTOP) as watched:
        bring_to_life(watched.page)
        yield watched

        assert watched.faults == []


def fetched(watched: Watched) -> set[str]:
    """Return the names of recordings that the page has requested."""
    return {re.sub(r".*/rec/|\.json.*", "", url) for url in watched.requests if "/rec/" in url}


def summary(page: Page, title: str) -> Locator:
    """Return the sentence below a figure."""
    return page.get_by_role("figure", name=title).locator("figcaption > p").first


def said(part: Locator) -> list[str]:
    """Return the words of a part, without table buttons, which appear after hydration."""
    return re.sub(r"Data table\s+for “[^”]*”", "", part.inner_text()).split()


def test_recordings_come_when_a_part_is_near(browser: Browser, address: str) -> None:
    """The data of these parts is fetched when they are near; their text exists before and stays the same."""
    with opened(browser, address, **PHONE) as watched:
        page = watched.page

        assert fetched(watched) & set(PARTS.values()) == set()
        # Text of undrawn elements is empty.
        page.evaluate(
            "document.querySelectorAll('main section').forEach(one => one.style.contentVisibility = 'visible')"
        )
        words = {part: said(page.locator(f"#{part}")) for part in PARTS}  # before any of them is near
        for part, recording in PARTS.items():
            own = page.locator(f"#{part}")
            own.scroll_into_view_if_needed()
            expect(own.locator("[data-later]").first).to_have_attribute("data-later", "alive")
            assert recording in fetched(watched)
            assert said(own) == words[part]
        assert watched.faults == []


def asked(watched: Watched) -> set[str]:
    """Return the files that the page has requested, without recordings."""
    paths = {url.removeprefix(watched.origin.partition("#")[0]) for url in watched.requests}
    return {path for path in paths if not path.startswith(("rec/", "data:", "#"))}


def test_the_first_screen_needs_little(browser: Browser, address: str) -> None:
    """The page starts with one script, without recordings or parts further down."""
    with opened(browser, address, **DESKTOP) as watched:
        expect(watched.page.locator("#top").get_by_role("slider", name="Micro-batch")).to_be_enabled()
        early = {name.removeprefix("parts/") for name in asked(watched) if name.startswith("parts/")}

        assert asked(watched) >= {"", "app.js", "app.css"}
        assert early <= {"kit.js", "gpu_memory.js", "split_sum.js"}  # parts near the first screen
        assert fetched(watched) <= {"memory_wall", "split_sum"}
        assert "math.woff2" not in asked(watched)
        assert watched.page.locator("main details.deeper [data-later=waiting]").count() > 0


@pytest.mark.parametrize(("part", "script"), [("planner", "planner.js"), ("forecast", "forecast.js")])
def test_a_link_brings_what_it_leads_to(browser: Browser, address: str, part: str, script: str) -> None:
    """A link to a fold opens it, fetches its script and data, and no other part's."""
    with opened(browser, address, **DESKTOP) as watched:
        page = watched.page
        assert f"parts/{script}" not in asked(watched)
        page.evaluate("part => location.hash = part", part)
        place = page.locator(f"#{part}")
        expect(place.locator("[data-later]")).to_have_attribute("data-later", "alive")
        expect(place).to_be_in_viewport()
        expect(place.locator("input, select").first).to_be_enabled()

        assert f"parts/{script}" in asked(watched)
        assert "parts/playground.js" not in asked(watched)
        assert watched.faults == []


def test_a_part_that_cannot_come_stays_readable(browser: Browser, address: str) -> None:
    """If a script cannot be fetched, the part is marked as failed, and its text stays."""
    with opened(browser, address, **DESKTOP) as watched:
        page = watched.page
        page.route("**/parts/mathematics.js", lambda route: route.abort())
        place = page.locator("#mathematics")
        place.scroll_into_view_if_needed()
        expect(place.locator("[data-later]").first).to_have_attribute("data-later", "failed")
        expect(place).to_contain_text("The gradient of a sum is the sum of the gradients")


def test_lanes_follow_keys(alive: Watched) -> None:
    """With the arrow keys the lanes show another strategy, and the sentence below shows its bytes."""
    page = alive.page
    said = summary(page, "One step, rank by rank")
    expect(said).to_contain_text("3.38 MiB")
    page.get_by_role("radio", name="no_sync, correct").focus()
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("no_sync, backward only")
    expect(said).to_contain_text("13.5 MiB")
    page.get_by_role("figure", name="One step, rank by rank").locator("label", has_text="4").click()
    expect(said).to_contain_text("4 ranks")


def test_a_cap_makes_the_recorded_cut(alive: Watched) -> None:
    """Keys move the cap to the recorded micro-batches, in words and in the drawing."""
    page = alive.page
    figure = page.get_by_role("figure", name="One batch of sentences, split")
    figure.locator("label", has_text="ab.token_budget").click()
    figure.get_by_role("slider").focus()
    page.keyboard.press("Home")
    data = json.loads((RECORDINGS / "length_cuts.json").read_text(encoding="utf-8"))["data"]
    (way,) = [one for one in data["ways"] if one["cap"] == data["caps"][0] and one["way"] == "token_budget"]
    expect(summary(page, "One batch of sentences, split")).to_contain_text(f"{len(way['cuts'])} micro-batches")
    expect(figure.locator(".wide svg text")).to_have_count(len(way["cuts"]))


def test_what_is_ticked_is_shown_with_its_number(alive: Watched) -> None:
    """The space key adds a cause with its recorded error, line and command, and removes it."""
    page = alive.page
    box = page.locator("#why-wrong").get_by_label("BatchNorm", exact=True)
    within = page.locator("#why-wrong")
    card = within.get_by_role("article", name="BatchNorm", exact=True)
    expect(card).to_have_count(0)
    box.focus()
    page.keyboard.press("Space")
    errors = json.loads((RECORDINGS / "wrong_losses.json").read_text(encoding="utf-8"))["data"]["errors"]
    assert float(card.locator("data").first.get_attribute("value") or "nan") == errors["batch_norm"]
    expect(card).to_contain_text("nn.BatchNorm2d")
    expect(card).to_contain_text("anybatch check")
    page.keyboard.press("Space")
    expect(card).to_have_count(0)
