"""Private interfaces of torch that ranks use. Seen on the versions in `anybatch.core.torch_internals.SEEN`."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

# Before any group: its functions have the default group of the moment of their import as a default argument. DDP and
# torch.compile import it too, and if that comes first within a group, that group never ends, with threads and sockets.
import torch.distributed.nn.functional  # noqa: F401
from torch import nn
from torch.distributed import distributed_c10d

from anybatch.core.torch_internals import needed_for

if TYPE_CHECKING:  # they are public, and torch's annotations know them by their private home alone
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, Store

__all__ = [
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ShardedGroup",
    "Store",
    "begin_as_root",
    "default_store",
    "root_of",
    "sharded_group",
]
_SHARDING = "Training sharded parameters"


def default_store(of: Any = distributed_c10d) -> Store:  # noqa: ANN401 (torch)
    """Return the key-value store by which the default group's ranks have met: `_get_default_store`.

    Raises:
        UnsupportedTorchError: torch does not hand it out, so that a rank could not say why it failed.
    """
    with needed_for("Training on several ranks"):
        store: Store = of._get_default_store()
    return store


def begin_as_root(root: nn.Module) -> None:
    """Make a module the root of all sharded modules inside it, before one of them runs by itself and becomes one.

    Args:
        root: a module that `fully_shard` was called on.

    Raises:
        UnsupportedTorchError: FSDP2 keeps its state elsewhere.
    """
    with needed_for(_SHARDING):
        root._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def root_of(module: nn.Module) -> nn.Module | None:
    """Return the root that a sharded module has run under; None if none has run yet.

    Args:
        module: a module that `fully_shard` was called on.

    Raises:
        UnsupportedTorchError: FSDP2 keeps its state elsewhere.
    """
    with needed_for(_SHARDING):
        states = module._get_fsdp_state()._state_ctx.all_states  # type: ignore[operator]
        return states[0]._modules[0] if states else None


def sharded_group(module: nn.Module) -> "ShardedGroup | None":
    """Return the parameters that a sharded module gathers and reduces together, without those of its children.

    Args:
        module: a module that `fully_shard` was called on.

    Raises:
        UnsupportedTorchError: FSDP2 keeps its state elsewhere.
    """
    with needed_for(_SHARDING):
        # None if its children have taken all parameters.
        group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    return None if group is None else ShardedGroup(group)


class ShardedGroup:
    """Parameters that FSDP2 gathers in one collective, and whose gradients it reduces in one.

    Args:
        group: torch's own `FSDPParamGroup`.
    """

    def __init__(self, group: Any) -> None:  # noqa: ANN401 (torch)
        self._group = group
        with needed_for(_SHARDING):
            self._members = group.fsdp_params
            self.shards: list[nn.Parameter] = [one.sharded_param for one in self._members]

    def on_whole_gradient(self, function: Callable[[int], None]) -> list[Any]:
        """Have a function called whenever a backward has added to the gradient of a gathered parameter.

        Args:
            function: called with the parameter's place in `shards`. The gathered parameters must have been gathered
                once, which makes them.

        Returns:
            Handles that remove the hooks.
        """
        handles = []
        for place, one in enumerate(self._members):
            whole = one._unsharded_param
            if whole.requires_grad:
                handles.append(whole.register_post_accumulate_grad_hook(lambda _, place=place: function(place)))
        return handles

    def drop_whole_gradients(self) -> None:
        """Forget gradients that have not been reduced yet, of parameters and of replicas."""
        for one in self._members:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
        self._group._partial_reduce_output = None
