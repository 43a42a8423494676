"""One browser and one server for all tests of a module."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.guide.browser.chromium import launched, served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the browser."""
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Serve the page."""
    with served() as address:
        yield address
