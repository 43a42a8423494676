"""Private torch interfaces that ranks use: the store of the default group."""

from types import SimpleNamespace

import pytest

from anybatch.errors import UnsupportedTorchError
from anybatch.parallel.torch_internals import HashStore, default_store


def test_the_store_is_the_group_s() -> None:
    """The default group's store is returned; if torch hides it, training on several ranks is refused."""
    store = HashStore()

    assert default_store(SimpleNamespace(_get_default_store=lambda: store)) is store
    with pytest.raises(UnsupportedTorchError, match="several ranks"):
        default_store(SimpleNamespace())
