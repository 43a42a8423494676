"""The playground without an engine: recorded runs."""

from playwright.sync_api import Browser, expect

from guide.tests.browser.chromium import DESKTOP, come_to, opened
from guide.tests.browser.element_checks import readout, slider


def test_a_lower_memory_limit_gives_smaller_micro_batches(browser: Browser, address: str) -> None:
    """Dragging the limit below the peak shows the retries and a lower peak; far below, no micro-batch fits."""
    with opened(browser, address, **DESKTOP) as watched:
        part = come_to(watched.page, "playground")
        limit, readouts = slider(part, "Memory limit"), part.locator(".readouts")
        expect(limit).to_have_attribute("aria-valuetext", "none")

        limit.press("ArrowLeft")
        expect(limit).to_have_attribute("aria-valuetext", "4\u00a0MiB")
        expect(readouts).not_to_contain_text("Out of memory")
        expect(readout(part, "peak memory")).to_have_text("3.84\u00a0MiB")
        sizes = {"3\u00a0MiB": "32", "2\u00a0MiB": "32, then 16", "1.25\u00a0MiB": "32, then 16, then 8"}
        for text, retries in sizes.items():
            limit.press("ArrowLeft")
            expect(limit).to_have_attribute("aria-valuetext", text)
            expect(readouts).to_contain_text(f"repeated in micro-batches of {retries}. Each sample counts once.")

        limit.press("Home")
        expect(readouts).to_contain_text("None of them fit.")
        assert watched.faults == []
