"""Draw the pictures of docs/guide.md from an exported page: `python -m docs.draw_guide`; needs Chromium."""

import tempfile
from pathlib import Path

from playwright.sync_api import Page, expect

from anybatch_guide.export import DIST, export_folder
from guide.tests.browser.chromium import DESKTOP, bring_to_life, come_to, launched, opened, served

DOCS = Path(__file__).parent
BACKWARD = "10.5"
"""Second of the scene in which the first micro-batch runs its backward."""
THIRD_GRADIENT = 21
"""Moment of the loop after the third micro-batch is added."""
SETTLE = """async () => {
    document.activeElement.blur();
    await Promise.all(document.getAnimations().map(one => one.finished));
}"""


def draw(page: Page) -> None:
    """Draw the first screen, the loop, the memory of a step, and a playground run with a mistake."""
    bring_to_life(page)
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    page.get_by_role("slider", name="Position in the scene").fill(BACKWARD)
    page.evaluate(SETTLE)
    page.screenshot(path=DOCS / "guide_first_screen.png")
    page.evaluate("document.getElementById('loop').scrollIntoView({behavior: 'instant'})")
    expect(page.locator("nav.wide a[href='#loop']")).to_have_attribute("aria-current", "true")
    page.locator("#loop").get_by_role("slider", name="Moment of the run").fill(str(THIRD_GRADIENT))
    page.evaluate("document.activeElement.blur()")
    page.screenshot(path=DOCS / "guide_loop.png")
    come_to(page, "memory").locator("figure").nth(1).screenshot(path=DOCS / "guide_memory.png")
    playground = come_to(page, "playground")
    playground.get_by_role("button", name="Forgot to divide").click()
    expect(playground.locator(".which")).to_have_text(
        "digits 16 \u00d7 4, SGD, forget to divide (recorded)", timeout=60_000
    )
    page.mouse.move(0, 0)  # away from a number field, which would show its arrows
    playground.locator("figure").first.screenshot(path=DOCS / "guide_playground.png")


def main() -> None:
    """Export the page, and draw it in light mode."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(export_folder(DIST, Path(folder) / "guide")) as address,
        launched() as browser,
        opened(browser, address, **DESKTOP, color_scheme="light") as watched,
    ):
        draw(watched.page)


if __name__ == "__main__":
    main()
