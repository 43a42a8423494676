"""Parts hydrated near the screen fetch their data on demand and work."""

import re
from collections import Counter

import pytest
from playwright.sync_api import Browser, Locator, expect

from guide.tests.browser.chromium import DESKTOP, PHONE, Watched, come_to, opened

PARTS = {
    "devices": "ddp_timeline",
    "batch-size": "rates_by_batch",
    "lengths": "length_cuts",
    "why-wrong": "wrong_losses",
}


def fetched(watched: Watched) -> set[str]:
    """Return the names of recordings that the page has requested."""
    return {re.sub(r".*/rec/|\.json.*", "", url) for url in watched.requests if "/rec/" in url}


def said(part: Locator) -> list[str]:
    """Return the words of a part that is drawn, without the ticks of charts, which follow their size."""
    drawn, ticks = part.inner_text().split(), part.locator("svg[aria-hidden] text").all_text_contents()
    return list((Counter(drawn) - Counter(" ".join(ticks).split())).elements())


def test_recordings_are_fetched_near_their_part(browser: Browser, address: str) -> None:
    """The data of these parts is fetched when they are near; their text exists before and stays the same."""
    with opened(browser, address, **PHONE) as watched:
        page = watched.page

        assert fetched(watched) & set(PARTS.values()) == set()
        # Text of undrawn elements, and of closed folds, is empty.
        page.evaluate(
            "document.querySelectorAll('main section').forEach(one => one.style.contentVisibility = 'visible')"
        )
        page.evaluate("document.getElementById('lengths').open = true")
        words = {part: said(page.locator(f"#{part}")) for part in PARTS}  # before any of them is near
        for part, recording in PARTS.items():
            own = page.locator(f"#{part}")
            own.locator("[data-later]").first.scroll_into_view_if_needed()
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
        expect(watched.page.locator("#top").get_by_role("slider", name="Position in the scene")).to_be_enabled()
        early = {name.removeprefix("parts/") for name in asked(watched) if name.startswith("parts/")}

        assert asked(watched) >= {"", "app.js", "app.css"}
        assert early <= {"kit.js", "gpu_memory.js", "split_sum.js"}  # parts near the first screen
        assert fetched(watched) <= {"memory_wall", "split_sum"}
        assert "math.woff2" not in asked(watched)
        assert watched.page.locator("main details.deeper [data-later=waiting]").count() > 0


@pytest.mark.parametrize(("part", "script"), [("planner", "planner.js"), ("forecast", "forecast.js")])
def test_a_link_loads_only_its_part(browser: Browser, address: str, part: str, script: str) -> None:
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


def test_a_part_that_fails_to_load_stays_readable(browser: Browser, address: str) -> None:
    """If a script cannot be fetched, the part is marked as failed, and its text stays."""
    with opened(browser, address, **DESKTOP) as watched:
        page = watched.page
        page.route("**/parts/mathematics.js", lambda route: route.abort())
        place = page.locator("#mathematics")
        place.scroll_into_view_if_needed()
        expect(place.locator("[data-later]").first).to_have_attribute("data-later", "failed")
        expect(place).to_contain_text("The gradient of the full batch is a mean")


def test_a_link_to_a_card_shows_the_card(browser: Browser, address: str) -> None:
    """The link from the mathematics brings the card itself into view."""
    with opened(browser, address, **DESKTOP) as watched:
        come_to(watched.page, "mathematics").get_by_role("link", name="contrastive learning").click()
        card = watched.page.get_by_role("article", name="Contrastive learning")
        expect(card).to_be_in_viewport(ratio=1)


def test_the_batch_size_is_one_of_the_task(browser: Browser, address: str) -> None:
    """Another task changes the size in the field to one that the task has, as in the sentence below."""
    with opened(browser, address, **DESKTOP) as watched:
        figure = come_to(watched.page, "batch-size").locator("figure", has_text="Learning rate by batch size")
        size = figure.get_by_role("spinbutton", name="Effective batch size")
        for task, expected in (("text, SGD", "128"), ("digits, SGD", "256")):
            figure.get_by_role("radio", name=task).check()
            expect(size).to_have_value(expected)
            expect(figure).to_contain_text(f"for batches of {expected}")
