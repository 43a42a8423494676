"""Fixtures: one browser per module, one exported page, and two ranks."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from anybatch_guide.export import DIST, export_folder
from guide.tests.browser.chromium import launched, served
from tests.ranks_fixture import two_ranks

__all__ = ["address", "browser", "two_ranks"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the browser."""
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Export the page into a folder, and serve it."""
    with served(export_folder(DIST, tmp_path_factory.mktemp("exported"))) as address:
        yield address
