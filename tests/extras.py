"""Tests that need a package which an extra of anybatch brings: skipped with the reason where it is not there."""

from importlib.util import find_spec

import pytest


def skip_without(package: str, extra: str) -> None:
    """Skip the tests of the module that calls, unless a package can be imported.

    It is only looked for: `pytest.importorskip` would import it in every process that collects tests, for a second.

    Args:
        package: its top-level name.
        extra: what installs it, such as "anybatch[recipes]".
    """
    if find_spec(package) is None:
        pytest.skip(f"needs the extra {extra}", allow_module_level=True)
