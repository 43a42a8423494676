"""What ranks ask of torch in private: the store by which they have met."""

from types import SimpleNamespace

import pytest

from anybatch.errors import UnsupportedTorchError
from anybatch.parallel.torch_internals import HashStore, default_store


def test_the_store_is_the_group_s() -> None:
    """What the default group has met by is handed out as it is; where torch does not, training on ranks is refused."""
    store = HashStore()

    assert default_store(SimpleNamespace(_get_default_store=lambda: store)) is store
    with pytest.raises(UnsupportedTorchError, match="several ranks"):
        default_store(SimpleNamespace())
