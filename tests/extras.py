"""Skip tests that need a package from one of anybatch's extras."""

from importlib.util import find_spec

import pytest


def skip_without(package: str, extra: str) -> None:
    """Skip the tests of the calling module unless a package is installed.

    `pytest.importorskip` would import it in every process that collects tests, which takes a second.

    Args:
        package: its top-level name.
        extra: the extra that installs it, such as "anybatch[recipes]".
    """
    if find_spec(package) is None:
        pytest.skip(f"needs the extra {extra}", allow_module_level=True)
