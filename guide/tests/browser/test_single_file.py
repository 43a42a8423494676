"""The guide as a single file, opened from disk."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from anybatch_guide.export import DIST, export_file
from guide.tests.browser.chromium import (
    DESKTOP,
    ORPHANS,
    PHONE,
    bring_to_life,
    come_to,
    opened,
    scroll_through,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the guide."""
    return export_file(DIST, tmp_path_factory.mktemp("exported") / "guide.html")


@pytest.mark.parametrize("look", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_file_needs_no_requests(browser: Browser, file: Path, look: dict[str, Any]) -> None:
    """The file hydrates and scrolls to its end without errors or requests."""
    with opened(browser, file.as_uri(), **look) as watched:
        scroll_through(watched.page)
        bring_to_life(watched.page)

        assert watched.faults == []
        assert [url for url in watched.requests if not url.startswith("data:")] == [file.as_uri()]


def test_recordings_are_embedded(browser: Browser, file: Path) -> None:
    """A task that a served page would fetch is embedded with its runs, without an engine."""
    with opened(browser, file.as_uri(), **DESKTOP) as watched:
        part = come_to(watched.page, "playground")
        part.get_by_label("Data", exact=True).select_option("shapes")

        expect(part.locator("dl div", has_text="optimizer steps").locator("data")).not_to_have_text("0")
        expect(part.get_by_text("AdamW, batch norm (recorded)").first).to_be_visible()
        expect(part.get_by_role("button", name="Train")).to_have_count(0)
        assert watched.page.locator("main").evaluate(ORPHANS) == []
        assert watched.faults == []
