"""Private interfaces of torch that ranks use. Seen on the versions in `anybatch.core.torch_internals.SEEN`."""

from typing import TYPE_CHECKING, Any

# Before any group: its functions have the default group of the moment of their import as a default argument. DDP and
# torch.compile import it too, and if that comes first within a group, that group never ends, with threads and sockets.
import torch.distributed.nn.functional  # noqa: F401
from torch.distributed import distributed_c10d

from anybatch.core.torch_internals import needed_for

if TYPE_CHECKING:  # they are public, and torch's annotations know them by their private home alone
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, Store

__all__ = ["GradBucket", "HashStore", "PrefixStore", "Store", "default_store"]


def default_store(of: Any = distributed_c10d) -> Store:  # noqa: ANN401 (torch)
    """Return the key-value store by which the default group's ranks have met: `_get_default_store`.

    Raises:
        UnsupportedTorchError: torch does not hand it out, so that a rank could not say why it failed.
    """
    with needed_for("Training on several ranks"):
        store: Store = of._get_default_store()
    return store
