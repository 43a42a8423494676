"""Private torch interfaces that ranks use: the store of the default group, users of memory."""

from types import SimpleNamespace

import pytest
import torch

from anybatch.errors import UnsupportedTorchError
from anybatch.parallel.torch_internals import HashStore, default_store, num_storage_users


def test_the_store_of_the_default_group() -> None:
    """The default group's store is returned; if torch hides it, training on several ranks is refused."""
    store = HashStore()

    assert default_store(SimpleNamespace(_get_default_store=lambda: store)) is store
    with pytest.raises(UnsupportedTorchError):
        default_store(SimpleNamespace())


def test_shared_memory_is_counted() -> None:
    """A storage's users are the tensors that share it; without torch's count the result is None."""
    tensor = torch.zeros(3)
    assert num_storage_users(tensor.untyped_storage()) == 1
    view = tensor[1:]
    assert num_storage_users(view.untyped_storage()) == len([tensor, view])
    assert num_storage_users(tensor.untyped_storage(), SimpleNamespace()) is None
