"""Every element of the list in `docs/guide.md` is in its part of the page and works."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, FloatRect, Locator, Page, expect

from guide.tests.browser.chromium import DESKTOP, bring_to_life, come_to, opened
from tests.architecture.source_tree import ROOT

PLAYED = """async loop => {
    const does = loop.querySelector('.does'), seen = [phase()];
    function phase() {
        const lit = loop.querySelector('.phases [aria-current=step]');
        return lit ? lit.textContent : does.textContent.startsWith('P.grad is cleared') ? 'clear' : does.textContent;
    }
    await new Promise(done => {
        const watch = new MutationObserver(() => {
            seen.push(phase());
            if (seen.length === 8) { watch.disconnect(); done(); }
        });
        watch.observe(does.closest('.walk').querySelector('.code'), {subtree: true, attributes: true});
        watch.observe(does, {subtree: true, characterData: true});
        loop.querySelector('.play').click();
    });
    loop.querySelector('.play').click();
    return seen;
}"""
"""Plays the loop, and returns its first phases."""


class Row(NamedTuple):
    """An element in the table in `docs/guide.md`: its name, its part of the page, its selector and expected text."""

    element: str
    place: str
    there: str
    text: str = ""


def card(title: str) -> str:
    """Return the selector of a claim's card."""
    return f'article[aria-label="{title}"] .head'


def slider(name: str) -> str:
    """Return the selector of a slider."""
    return f'role=slider[name="{name}"]'


def readout(name: str) -> str:
    """Return the selector of a read-out of the playground."""
    return f'dl div:has(dt:text-is("{name}")) dd >> nth=0'


ROWS = (
    Row("title", "top", "h1", "Gradient accumulation"),
    Row("promise in one line", "top", ".lead", "Train with a large batch in the memory of a small one"),
    Row("start button", "top", "role=link[name=/^Start/]", "Start"),
    Row("memory: slider of the batch size", "gpu-memory", slider("Batch size")),
    Row("memory: slider of the GPU's memory", "gpu-memory", slider("Memory of the GPU")),
    Row("memory: whether it fits", "gpu-memory", ".verdict", "Does not fit"),
    Row("split", "split", "figure svg path.of-1 >> nth=0"),
    Row("accumulate", "split", "figure svg text:text-is('sum in p.grad') >> nth=0", "sum in p.grad"),
    Row("update", "loop", ".strips p:has-text('the weights')", "the weights"),
    Row("full loop, animated", "loop", "role=button[name='Play']", "Play"),
    Row("full loop: counters", "loop", ".counts", "of 4 added"),
    Row("full loop: phases", "loop", ".phases", "forward"),
    Row("mathematics 1: the loss is a mean", "mathematics", ".steps > li:nth-child(1) math", "L"),
    Row("mathematics 2: gradient of a sum", "mathematics", ".steps > li:nth-child(2) math", "∑"),
    Row("mathematics 3: a sum in groups", "mathematics", ".steps > li:nth-child(3) math >> nth=0", "K"),
    Row("mathematics 4: one update", "mathematics", ".steps > li:nth-child(4) math >> nth=0", "θ"),
    Row("code", "split", "figure.code, pre >> nth=0", "backward()"),
    Row("code: lights up with the picture", "loop", ".code [aria-current=step]"),
    Row("memory, unsplit against accumulated", "memory", slider("Micro-batch")),
    Row("advantage 1: less memory", "claims", card("Less memory"), "true"),
    Row("advantage 2: the same gradient", "claims", card("The same gradient"), "true only if"),
    Row("advantage 3: less noise", "claims", card("Less noise"), "true only if"),
    Row("advantage 4: any hardware", "claims", card("Any hardware"), "true"),
    Row("limitation 1: time", "claims", card("N times longer"), "true only if"),
    Row("limitation 2: BatchNorm", "claims", card("BatchNorm"), "true"),
    Row("limitation 3: stale gradients", "claims", card("Stale gradients"), "false"),
    Row("limitation 4: memory of gradients", "claims", card("Memory is not free"), "true"),
    Row("playground: micro-batch size, 16", "playground", "role=spinbutton[name='Micro-batch, samples']", "16"),
    Row("playground: accumulation steps, 4", "playground", "role=spinbutton[name='Accumulation steps']", "4"),
    Row("playground: effective batch, 64", "playground", ".batch strong", "64"),
    Row("playground: loss, 2.30", "playground", readout("current loss"), "2.30"),
    Row("playground: optimizer steps, 0", "playground", readout("optimizer steps"), "0"),
    Row("playground: predicted memory", "playground", readout("peak memory"), "1.4\u00a0MiB"),
)


@pytest.fixture(scope="module")
def page(browser: Browser, address: str) -> Iterator[Page]:
    """Open the exported page, and hydrate all of it."""
    with opened(browser, address, **DESKTOP) as watched:
        bring_to_life(watched.page)
        yield watched.page

        assert watched.faults == []


def test_every_element_is_on_the_page(page: Page) -> None:
    """Each element is visible in its part of the page, with its text."""
    for row in ROWS:
        place = come_to(page, row.place) if row.place != "top" else page.locator("#top")
        found = place.locator(row.there).locator("visible=true").first
        found.scroll_into_view_if_needed()
        expect(found).to_be_in_viewport()
        shown = found.evaluate("one => one.matches('input') ? one.value : one.textContent")
        assert row.text in str(shown), row.element


def test_the_table_is_the_list() -> None:
    """The table in `docs/guide.md` has these elements in this order, each as present, with the link to its part."""
    table = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| yes \| `#([\w-]+)` \|$", table, re.MULTILINE)

    assert rows == [(row.element, row.place) for row in ROWS]


def phase_of(place: Locator) -> str:
    """Return the phase that the readout of a figure shows."""
    return place.locator(".phases [aria-current=step]").inner_text()


def works_through_a_split(split: Locator) -> None:
    """Opens ready with one whole batch and no sum; then each micro-batch is added, and one update moves the weights."""
    count, blocks, sums = split.locator(".count"), split.locator("svg:visible .block"), split.locator(".sum .on")
    following = split.get_by_role("button", name="Next")
    expect(count).to_have_text("micro-batch \u2013 of 4 \u00b7 0 of 4 added \u00b7 0 updates")
    assert phase_of(split) == "ready"
    whole = box_of(blocks.nth(3))["x"]
    expect(sums).to_have_count(0)
    for number in range(1, 5):
        following.click()
        assert phase_of(split) == "forward"
        expect(count).to_contain_text(f"micro-batch {number} of 4 \u00b7 {number - 1} of 4 added")
        expect(split.locator("svg:visible .runs text")).to_have_text(str(number))
        following.click()
        assert phase_of(split) == "backward"
        expect(count).to_contain_text(f"micro-batch {number} of 4 \u00b7 {number} of 4 added")
        expect(sums).to_have_count(number)
    weights = split.locator("svg:visible .weights .gradient")
    before = weights.get_attribute("d")
    following.click()
    assert phase_of(split) == "update"
    expect(count).to_contain_text("4 of 4 added \u00b7 1 update")
    assert weights.get_attribute("d") != before
    expect(following).to_be_disabled()
    assert box_of(blocks.nth(3))["x"] > whole + 20  # the micro-batches moved apart
    split.get_by_role("radio", name="its own samples").check(force=True)
    expect(split.locator("figcaption").first).to_contain_text("The relative error of the sum is 28%")
    assert split.locator("svg:visible .beyond >> nth=0").get_attribute("d")  # bars that leave the picture are marked


def box_of(element: Locator) -> FloatRect:
    """Return the place of an element."""
    box = element.bounding_box()
    assert box is not None
    return box


def works_through_the_loop(loop: Locator) -> None:
    """Opens ready; every line shows its phase and micro-batch; playing skips lines that compute nothing."""
    counts, following = loop.locator(".counts"), loop.get_by_role("button", name="Next")
    line = loop.locator(".code [aria-current=step]")
    expect(counts).to_have_text("micro-batch \u2013 of 4 0 of 4 added 0 updates", use_inner_text=True)
    assert phase_of(loop) == "ready"
    seen: list[tuple[str | None, str]] = []
    while "4 of 4 added" not in counts.inner_text():
        following.click()
        lit = loop.locator(".phases [aria-current=step]")
        seen.append((line.get_attribute("data-line"), lit.inner_text() if lit.count() else ""))
    window = [("19", "forward"), ("20", "forward"), ("21", "forward"), ("22", "backward"), ("22", "accumulate")]
    assert [one for one in seen if one[1]] == window * 4
    assert {one for one in seen if not one[1]} == {("17", ""), ("18", ""), ("24", "")}
    loop.get_by_role("slider", name="Moment of the run").fill("0")
    loop.get_by_label("Speed").select_option("4\u00d7")
    played = loop.evaluate(PLAYED)
    assert played == ["ready", "clear", *["forward"] * 3, "backward", "accumulate", "forward"]


def test_the_elements_work(page: Page) -> None:
    """Sliders change the verdict and bars, a button changes the sum, and the loop advances its counters and line."""
    memory = come_to(page, "gpu-memory")
    memory.locator(slider("Batch size")).press("Home")
    expect(memory.locator(".verdict")).to_have_text("Fits")
    works_through_a_split(come_to(page, "split"))
    works_through_the_loop(come_to(page, "loop"))
    bars = come_to(page, "memory").locator("figure").first
    drawing = bars.locator("svg[role=img]").locator("visible=true")
    before = drawing.get_attribute("aria-label")
    bars.locator(slider("Micro-batch")).press("End")
    assert drawing.get_attribute("aria-label") != before
