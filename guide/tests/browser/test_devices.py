"""The chapter on several devices: an all-reduce to play, step and scrub, and buckets on a chosen link."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, expect

from guide.tests.browser.chromium import DESKTOP, come_to, opened

SUMS = "64 21 -97 5 -97 -57 72 -41"  # of all 32 samples, in web/recordings/ddp_step.json


@pytest.fixture
def chapter(browser: Browser, address: str) -> Iterator[Locator]:
    """Open the page at the chapter."""
    with opened(browser, address, **DESKTOP) as watched:
        yield come_to(watched.page, "devices")

        assert watched.faults == []


def figure(chapter: Locator, title: str) -> Locator:
    """Return a figure of the chapter."""
    return chapter.locator("figure").filter(has_text=title)


HIDDEN = """ring => [...ring.querySelectorAll('.flying')].flatMap(cell => {
    const [at, own] = [cell.getBoundingClientRect(), cell.parentElement];
    return [...ring.querySelectorAll('.number')].filter(number => {
        const box = number.getBoundingClientRect();
        return at.width && box.width && !own.contains(number) && !number.parentElement.querySelector('.flying')
            && box.left < at.right && box.right > at.left && box.top < at.bottom && box.bottom > at.top;
    });
}).length"""
"""Numbers below a chunk that travels."""


def gradients(ring: Locator) -> list[str]:
    """Return the numbers in the chunks of each rank, in flight or not."""
    ranks = ring.locator("svg:visible > g:has(.lane)")
    return [
        " ".join(rank.locator(".number").all_text_contents()).replace("\N{MINUS SIGN}", "-") for rank in ranks.all()
    ]


def test_the_all_reduce_can_be_stepped_scrubbed_and_played(chapter: Locator) -> None:
    """Chunks travel to the next rank; at the end, all ranks hold the sum, and the bytes are counted."""
    ring = figure(chapter, "One step of DDP on four ranks")
    sent, time = ring.locator("dd").last, ring.get_by_role("slider")
    expect(sent).to_have_text("0 of 48 B")
    expect(ring.locator("li[aria-current=step]")).to_contain_text("Broadcast")
    time.fill("4.5")
    expect(ring.locator(".flying:visible")).to_have_count(4)
    assert ring.evaluate(HIDDEN) == 0
    expect(sent).to_have_text("8 of 48 B")
    before = gradients(ring)
    ring.get_by_role("button", name="Next").click()
    expect(sent).to_have_text("16 of 48 B")
    expect(ring.locator(".flying:visible")).to_have_count(0)
    assert len(set(gradients(ring))) == 4
    assert gradients(ring) != before

    time.press("Home")
    expect(ring.locator("li[aria-current=step]")).to_contain_text("Broadcast")
    assert gradients(ring) == [""] * 4
    time.press("End")
    expect(sent).to_have_text("48 of 48 B")
    expect(ring.locator("li[aria-current=step]")).to_contain_text("Update")
    assert gradients(ring) == [SUMS] * 4
    time.press("ArrowLeft")
    expect(ring.locator("li[aria-current=step]")).to_contain_text("All-reduce")
    time.press("End")

    ring.get_by_role("button", name="Play").click()
    expect(ring.locator("li[aria-current=step]")).to_contain_text("Backward")
    ring.get_by_role("button", name="Pause").click()
    stopped = time.input_value()
    assert 0 < float(stopped) < 10
    chapter.page.wait_for_timeout(200)
    assert time.input_value() == stopped


def test_buckets_and_links_change_the_calculated_step(chapter: Locator) -> None:
    """Sliders change the calculated timeline; a recorded timeline has another chip."""
    buckets = figure(chapter, "Buckets overlap with the backward pass")
    summary = buckets.locator("figcaption > p").first
    chip = buckets.locator("> .head")
    expect(chip).to_contain_text("calculated")
    expect(summary).to_contain_text("in 4 buckets")
    buckets.get_by_role("slider", name="bucket_cap_mb").press("End")
    expect(summary).to_contain_text("in 1 bucket.")
    buckets.get_by_role("slider", name="Straggler slower by").press("Home")
    expect(summary).to_contain_text("waits 0 ms for a slower rank")
    slow = summary.inner_text()
    buckets.get_by_role("slider", name="Link").press("End")
    expect(summary).not_to_have_text(slow)
    buckets.get_by_role("radio", name="recorded, 2 ranks").check()
    expect(chip).to_contain_text("recorded")
    expect(summary).to_contain_text("Recorded on 2 ranks")


def test_without_motion_key_frames_are_shown(browser: Browser, address: str) -> None:
    """Readers who prefer less motion see four moments, no Play button, and steps that jump."""
    with opened(browser, address, **DESKTOP, reduced_motion="reduce") as watched:
        ring = figure(come_to(watched.page, "devices"), "One step of DDP on four ranks")
        expect(ring.locator(".frames svg")).to_have_count(4)
        expect(ring.get_by_role("button", name="Play")).to_be_hidden()
        ring.get_by_role("button", name="Next").click()
        expect(ring.locator("li[aria-current=step]")).to_contain_text("Broadcast")
        expect(ring.locator(".frames")).to_have_count(0)
