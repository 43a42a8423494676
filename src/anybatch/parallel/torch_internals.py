"""Private interfaces of torch for ranks (named in docstrings), verified on `anybatch.core.torch_internals.SEEN`."""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

# Import `functional` before any group exists: its functions capture the default group as a default argument. DDP and
# torch.compile import it too; if a group exists at the first import, its threads and sockets would never be closed.
import torch
import torch.distributed.nn.functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from anybatch.core.torch_internals import needed_for

if TYPE_CHECKING:  # public classes, which torch's annotations only know by their private modules
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, Store, TCPStore
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, Store, TCPStore

__all__ = [
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ShardedGroup",
    "Store",
    "TCPStore",
    "begin_as_root",
    "copy_attributes",
    "default_store",
    "leak_process_groups",
    "local_offset",
    "num_storage_users",
    "root_of",
    "set_timeout",
    "sharded_group",
    "user_hooks_only",
    "without_hooks",
]
_SHARDING = "Training sharded parameters"
_REPLICAS = "Training replicas (strategy='data_parallel')"


def default_store(of: Any = distributed_c10d) -> Store:  # noqa: ANN401 (torch)
    """Return the default group's key-value store: `_get_default_store`."""
    with needed_for("Training on several ranks"):
        store: Store = of._get_default_store()
    return store


def num_storage_users(storage: torch.UntypedStorage, of: Any = torch._C) -> int | None:  # noqa: ANN401 (torch)
    """Return how many tensors share a storage: `_storage_Use_Count` minus the Python object; None if torch lacks it."""
    count = getattr(of, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata)) - 1


def set_timeout(timeout: timedelta, of: Any = distributed_c10d) -> None:  # noqa: ANN401 (torch)
    """Set how long collectives of the default group wait for other ranks: `_set_pg_timeout`."""
    with needed_for("Training on several ranks"):
        of._set_pg_timeout(timeout)


def leak_process_groups(of: Any = distributed_c10d) -> None:  # noqa: ANN401 (torch)
    """Keep the process groups until the process exits: gloo's destructor would wait for a host that has crashed.

    Does nothing if torch does not list its groups.
    """
    for group in getattr(getattr(of, "_world", None), "pg_map", ()):
        # A leaked reference: the interpreter, too, would run destructors at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@contextmanager
def user_hooks_only(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run only the user's forward hooks in the context; the engine's hooks are needed for the first replica alone."""
    with needed_for(_REPLICAS):
        tables = [(part, part._forward_hooks) for module in modules for part in module.modules()]
    try:
        for part, hooks in tables:  # replicas share them with the original
            kept = [(key, hook) for key, hook in hooks.items() if not type(hook).__module__.startswith("anybatch.")]
            part._forward_hooks = OrderedDict(kept)
        yield
    finally:
        for part, hooks in tables:
            part._forward_hooks = hooks


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a module with the same class, parts and attributes, without the hooks of the module itself."""
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy).update({name: value for name, value in vars(nn.Module()).items() if "_hooks" in name})
    return copy


def begin_as_root(root: nn.Module) -> None:
    """Make a `fully_shard`ed module the root of its sharded modules before one of them runs alone."""
    with needed_for(_SHARDING):
        root._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def copy_attributes(old: nn.Parameter, new: torch.Tensor, *, hooks: bool) -> None:
    """Copy the attributes of a parameter to its shard or gathered form; with `hooks`, also its `_backward_hooks`."""
    vars(new).update(vars(old))
    with needed_for(_SHARDING):
        if hooks and old._backward_hooks:
            new._backward_hooks = old._backward_hooks


def root_of(module: nn.Module) -> nn.Module | None:
    """Return the root under which a sharded module has run; None if none has run yet."""
    with needed_for(_SHARDING):
        states = module._get_fsdp_state()._state_ctx.all_states  # type: ignore[operator]
        return states[0]._modules[0] if states else None


def local_offset(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401 (a DTensor, whose import takes a second)
    """Return the start of this rank's part in a whole `DTensor`: `compute_local_shape_and_global_offset`."""
    with needed_for("Saving a checkpoint in parts"):
        from torch.distributed.tensor import _utils as placed  # noqa: PLC0415 (imported already if there is a DTensor)

        _, offset = placed.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


def sharded_group(module: Any) -> "ShardedGroup | None":  # noqa: ANN401 (an `FSDPModule`, whose import takes seconds)
    """Return the parameters that a sharded module gathers and reduces together, without its children's parameters."""
    with needed_for(_SHARDING):
        # None if its children own all parameters.
        group = module._get_fsdp_state()._fsdp_param_group
    return None if group is None else ShardedGroup(group)


class ShardedGroup:
    """Parameters that FSDP2 gathers in one collective, and whose gradients it reduces in one: `FSDPParamGroup`.

    `shards` are the parameters as the optimizer sees them. If `mesh` has two dimensions, replicas are along the first.
    """

    def __init__(self, group: Any) -> None:  # noqa: ANN401 (torch)
        self._group = group
        with needed_for(_SHARDING):
            self._members = group.fsdp_params
            self.mesh: DeviceMesh = group.mesh_info.mesh
            self.shards: list[nn.Parameter] = [member.sharded_param for member in self._members]
            # Used later, in the middle of a run: if one is missing, fail here.
            for name in ("post_backward", "reduce_grads", "_partial_reduce_output"):
                getattr(group, name)
            for member in self._members:
                member.unsharded_accumulated_grad  # noqa: B018 (see above)

    def on_whole_gradient(self, function: Callable[[int], None]) -> list[Any]:
        """Call `function(index in shards)` after a backward reaches a gathered parameter; return the hooks' handles.

        The parameters must have been gathered once.
        """
        handles = []
        for index, member in enumerate(self._members):
            gathered = member._unsharded_param
            if gathered.requires_grad:
                handles.append(gathered.register_post_accumulate_grad_hook(lambda _, index=index: function(index)))
        return handles

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The gathered parameters, in the order of `shards`; they must have been gathered once."""
        with needed_for(_SHARDING):
            return [member._unsharded_param for member in self._members]

    def reduce_unused(self) -> None:
        """Reduce zeros for parameters that a rank has not used, so that messages of all ranks are equally long.

        Torch 2.13 and later have an option for this.
        """
        with needed_for(_SHARDING):
            group, post_backward = self._group, self._group.post_backward

        def with_zeros(*args: Any) -> Any:  # noqa: ANN401 (torch's signature)
            for member in group.fsdp_params if group.reduce_grads else ():
                gathered = getattr(member, "_unsharded_param", None)
                if gathered is None or not gathered.requires_grad:
                    continue
                if gathered.grad is None and member.unsharded_accumulated_grad is None:
                    gathered.grad = torch.zeros_like(gathered)
            return post_backward(*args)

        group.post_backward = with_zeros

    def drop_whole_gradients(self) -> None:
        """Drop gradients that have not been reduced yet, of parameters and of replicas.

        Since torch 2.15, gathered parameters store them in `.grad`, and `unsharded_accumulated_grad` is read-only.
        """
        for member in self._members:
            if not isinstance(getattr(type(member), "unsharded_accumulated_grad", None), property):
                member.unsharded_accumulated_grad = None
            if hasattr(member, "_unsharded_param"):
                member._unsharded_param.grad = None
        self._group._partial_reduce_output = None
