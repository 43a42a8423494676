"""The mark of a figure opens the source of its numbers, its table and its code; pictures and cards are honest."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from anybatch_guide.export import DIST, export_file
from guide.tests.browser.chromium import AXE, DESKTOP, PHONE, absent, bring_to_life, come_to, opened

FIGURES = "main :is(figure, .cards article)"
MARKS = """all => all.map(
    one => [...one.querySelectorAll('button.mark')].filter(mark => mark.closest('figure, article') === one).length)"""
"""Number of marks of each figure, without nested figures."""


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open the exported page with access to the clipboard, and hydrate all of it."""
    with opened(browser, address, **DESKTOP, permissions=["clipboard-read", "clipboard-write"]) as watched:
        bring_to_life(watched.page)
        yield watched.page

        assert watched.faults == []


def opened_mark(figure: Locator) -> Locator:
    """Open the mark of a figure with the keyboard, and return its box."""
    mark = figure.locator("button.mark").first
    mark.evaluate("one => one.scrollIntoView({block: 'center', behavior: 'instant'})")
    mark.press("Enter")
    box = figure.locator("[popover]").first
    expect(box.get_by_role("button", name="Close")).to_be_visible()  # its content comes after the box
    mark.evaluate("one => one.scrollIntoView({block: 'center', behavior: 'instant'})")  # other parts may have grown
    return box


def test_each_figure_has_one_mark_and_no_folds(page: Page) -> None:
    """Every figure and card has one mark, which names what it belongs to, instead of collapsible sections."""
    counts = page.locator(FIGURES).evaluate_all(MARKS)
    names = page.locator("main figure button.mark").all_text_contents()

    assert len(counts) > 50
    assert set(counts) == {1}
    assert len(set(names)) == len(names)
    for fold in ("Data table", "Sources", "Copy as", "Measurements"):
        assert page.locator("main summary", has_text=fold).count() == 0


def test_a_mark_opens_source_table_and_code(page: Page) -> None:
    """The box names device, date and command of the recording, and has the table and the command to copy."""
    figure = come_to(page, "split").locator("figure", has_text="Split, accumulate, update")
    box = opened_mark(figure)
    expect(box).to_contain_text("To reproduce it: anybatch guide record split_sum")
    expect(box.locator("tbody tr")).to_have_count(64)
    expect(box).to_be_in_viewport(ratio=1)
    command = box.get_by_role("button", name="Copy command")
    for _ in range(6):
        page.keyboard.press("Tab")
        if command.evaluate("one => one === document.activeElement"):
            break
    page.keyboard.press("Enter")
    expect(box.get_by_role("button", name="Copied")).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == "python -m anybatch_guide.listings.split_sum"
    page.keyboard.press("Escape")
    expect(box).to_be_hidden()
    expect(figure.locator("button.mark")).to_be_focused()


def test_the_copied_link_leads_to_the_settings(page: Page) -> None:
    """The link in the box restores the chosen settings."""
    part = come_to(page, "split")
    part.locator("label", has_text="one sample").first.click()
    box = opened_mark(part.locator("figure").first)
    box.get_by_role("button", name="Copy link").click()
    link = page.evaluate("navigator.clipboard.readText()")
    page.keyboard.press("Escape")

    assert "#split?" in link
    assert "tail=one" in link


def test_marks_are_accessible(page: Page) -> None:
    """Axe finds no violations in the boxes of a figure, a card and a part."""
    if not AXE.exists():
        absent(f"ACCESSIBILITY IS NOT TESTED: {AXE} is missing; `make browser` installs it if npm is available")
    page.evaluate(AXE.read_text(encoding="utf-8"))
    for part, place in (("split", "figure"), ("claims", "article"), ("mathematics", "[data-later]")):
        box = opened_mark(come_to(page, part).locator(place).first)
        found = page.evaluate(
            "async id => (await axe.run('#' + id)).violations.map(one => one.id)", box.get_attribute("id")
        )
        page.keyboard.press("Escape")

        assert found == []


def test_marks_on_a_phone(browser: Browser, address: str) -> None:
    """On a phone the box is at the lower edge, as wide as the screen, and closes when the page is touched."""
    with opened(browser, address, **PHONE) as watched:
        figure = come_to(watched.page, "gpu-memory").locator("figure").first
        figure.locator("button.mark").tap()
        box = figure.locator("[popover]").first
        expect(box.locator("table")).to_be_visible()
        place = box.bounding_box()
        assert place is not None
        assert (place["x"], place["width"], place["y"] + place["height"]) == (0, 390, 844)
        expect(box).to_be_in_viewport(ratio=1)
        watched.page.touchscreen.tap(200, 40)
        expect(box).to_be_hidden()


def test_marks_without_scripts(browser: Browser, address: str) -> None:
    """Without scripts a mark opens the source."""
    with opened(browser, address, **DESKTOP, java_script_enabled=False) as still:
        figure = still.page.locator("#split figure").first
        figure.locator("button.mark").click()
        expect(figure.locator("[popover]")).to_contain_text("anybatch guide record split_sum")


def test_marks_in_a_single_file(browser: Browser, tmp_path: Path) -> None:
    """In the exported file the table opens, and nothing offers to run."""
    file = export_file(DIST, tmp_path / "guide.html")
    with opened(browser, file.as_uri(), **DESKTOP) as watched:
        box = opened_mark(come_to(watched.page, "split").locator("figure").first)
        expect(box.locator("tbody tr")).to_have_count(64)
        expect(box.get_by_role("button", name="Run it here")).to_have_count(0)


def test_forecasts_are_marked_as_forecasts(page: Page) -> None:
    """A claim with forecast numbers is marked as a forecast, not as a measurement."""
    part = page.locator("#devices")
    for title in ("Linear up to eight", "Buckets"):
        card = part.locator(f'article[aria-label="{title}"]')
        expect(card.locator("button.mark")).to_contain_text("forecast")
        expect(card.locator("[popover]")).to_contain_text("not measured")
        expect(card.locator("[popover]")).not_to_contain_text("Measured.")
    expect(part.locator('article[aria-label="DataParallel"] [popover]')).to_contain_text("Measured.")


def test_memory_grows_linearly_in_the_picture(page: Page) -> None:
    """In chapter one, equal differences of the batch are equal distances, and the memory follows a straight line."""
    part = come_to(page, "gpu-memory")
    dot = part.locator("circle.chosen").first
    places = {}
    for size in (8, 16, 24):
        part.get_by_role("spinbutton", name="Batch size, samples").fill(str(size))
        part.get_by_role("spinbutton", name="Batch size, samples").press("Enter")
        places[size] = [float(dot.get_attribute(name) or "nan") for name in ("cx", "cy")]
    (x8, y8), (x16, y16), (x24, y24) = places.values()

    assert x24 - x16 == pytest.approx(x16 - x8, abs=0.2)
    assert y8 - y16 == pytest.approx(y16 - y24, rel=0.02)
    expect(part.locator("figure text", has_text="largest that fits: 8")).to_have_count(1)


def test_the_log_is_replayed_by_a_slider(page: Page) -> None:
    """The slider moves through the lines of the log, and the gradient and the counters follow."""
    part = page.locator("#log")
    part.evaluate("fold => fold.open = true")
    slider, strip = part.get_by_role("slider", name="Line of the log"), part.locator("svg.strip")
    full = strip.inner_html()
    expect(part.locator(".readings")).to_contain_text("micro-batches added4 of 4")
    slider.press("Home")
    expect(part.locator(".readings")).to_contain_text("micro-batches added0 of 4")
    assert strip.inner_html() != full
    assert str(slider.get_attribute("aria-valuetext")).startswith("0.00 ms: ")


@pytest.mark.parametrize("part", ["gpu-memory", "memory", "playground"])
def test_sliders_grow_to_the_right(page: Page, part: str) -> None:
    """A larger number is further right, in every chapter."""
    place = come_to(page, part)
    for name in ("Batch size", "Micro-batch"):
        slider = place.get_by_role("slider", name=name, exact=True).first
        if not place.get_by_role("slider", name=name, exact=True).count():
            continue
        number = place.locator(f'input[type=number][aria-label^="{name}"]').first
        slider.press("Home")
        least = float(number.input_value())
        slider.press("ArrowRight")

        assert float(number.input_value()) > least


def test_the_chapters_stay_on_a_phone(browser: Browser, address: str) -> None:
    """On a phone the list of chapters stays in reach, names the current one, and closes when a chapter is chosen."""
    with opened(browser, address, **PHONE) as watched:
        page = watched.page
        come_to(page, "mathematics").locator("h2").evaluate("one => one.scrollIntoView({behavior: 'instant'})")
        row = page.locator(".narrow summary")
        expect(row).to_be_in_viewport()
        expect(row).to_contain_text("Why the sum is exact")
        row.tap()
        page.locator(".narrow a", has_text="The full loop").tap()
        expect(page.locator(".narrow a", has_text="The full loop")).to_be_hidden()
        expect(page.locator("#loop h2")).to_be_in_viewport()
        covered = page.evaluate(
            "document.querySelector('#loop h2').getBoundingClientRect().top - "
            "document.querySelector('.narrow').getBoundingClientRect().bottom"
        )
        assert covered >= 0
