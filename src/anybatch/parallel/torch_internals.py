"""Private interfaces of torch that ranks use. Seen on the versions in `anybatch.core.torch_internals.SEEN`."""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

# Before any group: its functions have the default group of the moment of their import as a default argument. DDP and
# torch.compile import it too, and if that comes first within a group, that group never ends, with threads and sockets.
import torch
import torch.distributed.nn.functional
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from anybatch.core.torch_internals import needed_for

if TYPE_CHECKING:  # they are public, and torch's annotations know them by their private home alone
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
    "carry_over",
    "default_store",
    "drop_engine_hooks",
    "has_thread_state",
    "is_in_forward",
    "keeps_graph",
    "leave_groups_alone",
    "local_offset",
    "replica_of",
    "root_of",
    "set_timeout",
    "sharded_group",
    "store_address",
    "without_hooks",
]
_SHARDING = "Training sharded parameters"
_REPLICAS = "Training replicas in threads (strategy='data_parallel')"


def default_store(of: Any = distributed_c10d) -> Store:  # noqa: ANN401 (torch)
    """Return the key-value store by which the default group's ranks have met: `_get_default_store`.

    Raises:
        UnsupportedTorchError: torch does not hand it out, so that a rank could not say why it failed.
    """
    with needed_for("Training on several ranks"):
        store: Store = of._get_default_store()
    return store


def set_timeout(timeout: timedelta, of: Any = distributed_c10d) -> None:  # noqa: ANN401 (torch)
    """Set how long collectives of the default group wait for other ranks: `_set_pg_timeout`.

    Raises:
        UnsupportedTorchError: torch does not let it be set.
    """
    with needed_for("Training on several ranks"):
        of._set_pg_timeout(timeout)


def leave_groups_alone(of: Any = distributed_c10d) -> None:  # noqa: ANN401 (torch)
    """Never let the process groups of this process end: gloo's destructor would wait for a host that is gone.

    The system ends them together with the process. Does nothing where torch does not say which there are.
    """
    for group in getattr(getattr(of, "_world", None), "pg_map", ()):
        # A reference that nobody returns: the interpreter, too, would run destructors on its way out.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def store_address(store: Store) -> tuple[str, int] | None:
    """Return the host and port at which a store is kept; None for one that is kept elsewhere, such as in a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def replica_of(module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a module that computes as another does, with other parameters and with copies of its buffers.

    It is made of shallow copies of the modules, as `nn.DataParallel` makes them: of the same classes, with the same
    attributes and the user's hooks. Hooks of the engine stay with the module itself.

    Args:
        module: of any depth; what it shares inside of it is shared inside of the replica too.
        parameters: by the id of each parameter what takes its place.

    Raises:
        UnsupportedTorchError: torch makes replicas otherwise.
    """
    buffers = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    with needed_for(_REPLICAS):
        pairs = [(original, original._replicate_for_data_parallel()) for original in module.modules()]
        replicas: dict[int, nn.Module] = {id(original): replica for original, replica in pairs}
        for original, replica in pairs:
            for name, child in original._modules.items():
                replica._modules[name] = None if child is None else replicas[id(child)]
            for name, parameter in original._parameters.items():
                if parameter is None:
                    replica._parameters[name] = None
                else:  # by the module itself: recurrent layers keep a list of them besides
                    setattr(replica, name, parameters[id(parameter)])
            for name, buffer in original._buffers.items():
                replica._buffers[name] = None if buffer is None else buffers[id(buffer)]
    drop_engine_hooks(replicas[id(module)])
    return replicas[id(module)]


def drop_engine_hooks(replica: nn.Module) -> None:
    """Leave the user's forward hooks alone on a replica: the engine's go by what the module itself sees.

    Args:
        replica: a module whose tables of hooks it shares with others; it gets its own.

    Raises:
        UnsupportedTorchError: torch keeps hooks elsewhere.
    """
    with needed_for(_REPLICAS):
        for part in replica.modules():
            kept = [(k, h) for k, h in part._forward_hooks.items() if not type(h).__module__.startswith("anybatch.")]
            part._forward_hooks = OrderedDict(kept)


def without_hooks(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same parts and attributes, without the hooks of the module itself.

    Args:
        module: what it shares everything with.
    """
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))
    vars(copy).update({name: value for name, value in vars(nn.Module()).items() if "_hooks" in name})
    return copy


def has_thread_state() -> bool:
    """Whether torch does something in this thread that a new thread would not do: modes, hooks on saved tensors.

    Raises:
        UnsupportedTorchError: torch does not say.
    """
    with needed_for(_REPLICAS):
        return bool(
            torch._C._len_torch_function_stack()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 (it takes no name)
        )


def keeps_graph() -> bool:
    """Whether the backward that runs in this thread was called with retain_graph=True.

    Raises:
        UnsupportedTorchError: torch does not say.
    """
    with needed_for(_REPLICAS):
        keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return keeps


def begin_as_root(root: nn.Module) -> None:
    """Make a module the root of all sharded modules inside it, before one of them runs by itself and becomes one.

    Args:
        root: a module that `fully_shard` was called on.

    Raises:
        UnsupportedTorchError: FSDP2 keeps its state elsewhere.
    """
    with needed_for(_SHARDING):
        root._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def carry_over(old: nn.Parameter, new: torch.Tensor, *, hooks: bool) -> None:
    """Give the replacement of a parameter its attributes and, if asked, its hooks, whose handles stay valid.

    Args:
        old: the parameter as the user knows it.
        new: its shard, or its gathered form.
        hooks: also the hooks of `Tensor.register_hook`: `Tensor._backward_hooks`.

    Raises:
        UnsupportedTorchError: tensors keep hooks elsewhere.
    """
    vars(new).update(vars(old))
    with needed_for(_SHARDING):
        if hooks and old._backward_hooks:
            new._backward_hooks = old._backward_hooks


def is_in_forward(root: nn.Module) -> bool:
    """Return whether the forward of a sharded root still counts as running: a backward inside it ends that.

    Args:
        root: a module that `fully_shard` was called on, whose forward runs.

    Raises:
        UnsupportedTorchError: FSDP2 keeps its state elsewhere.
    """
    with needed_for(_SHARDING):
        return root._get_fsdp_state()._state_ctx.iter_forward_root is not None  # type: ignore[operator]


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


def local_offset(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401 (a DTensor, whose import takes a second)
    """Return where this process's part of a `DTensor` begins in the whole: `compute_local_shape_and_global_offset`.

    Raises:
        UnsupportedTorchError: torch computes it elsewhere.
    """
    with needed_for("Saving a checkpoint in parts"):
        from torch.distributed.tensor import _utils as placed  # noqa: PLC0415 (where there is a DTensor, it is imported)

        _, offset = placed.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset)


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

    Attributes:
        shards: the parameters, as the optimizer sees them.
        mesh: over which they are sharded; where it has two dimensions, replicas are along the first.
    """

    def __init__(self, group: Any) -> None:  # noqa: ANN401 (torch)
        self._group = group
        with needed_for(_SHARDING):
            self._members = group.fsdp_params
            self.mesh: DeviceMesh = group.mesh_info.mesh
            self.shards: list[nn.Parameter] = [one.sharded_param for one in self._members]
            # Used later, in the middle of a run: if one is missing, fail here.
            for name in ("post_backward", "reduce_grads", "_partial_reduce_output"):
                getattr(group, name)
            for one in self._members:
                one.unsharded_accumulated_grad  # noqa: B018 (see above)

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

    @property
    def gathered(self) -> list[torch.Tensor]:
        """The parameters as they are while gathered, in the order of `shards`; they must have been gathered once."""
        with needed_for(_SHARDING):
            return [one._unsharded_param for one in self._members]

    def reduce_unused(self) -> None:
        """Have zeros reduced for what a rank has not used, before torch 2.13, which does so when it is asked to.

        Otherwise ranks that use different parameters would hand over messages of different lengths.
        """
        with needed_for(_SHARDING):
            group, post_backward = self._group, self._group.post_backward

        def with_zeros(*unused: Any) -> Any:  # noqa: ANN401 (torch's signature)
            for one in group.fsdp_params if group.reduce_grads else ():
                whole = getattr(one, "_unsharded_param", None)
                if whole is None or not whole.requires_grad:
                    continue
                if whole.grad is None and one.unsharded_accumulated_grad is None:
                    whole.grad = torch.zeros_like(whole)
            return post_backward(*unused)

        group.post_backward = with_zeros

    def drop_whole_gradients(self) -> None:
        """Forget gradients that have not been reduced yet, of parameters and of replicas.

        From torch 2.15 on they are in `.grad` of the whole parameter alone, and the other name is read-only.
        """
        for one in self._members:
            if not isinstance(getattr(type(one), "unsharded_accumulated_grad", None), property):
                one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
        self._group._partial_reduce_output = None
