"""Models whose parameters are split over processes: their rank layouts, and refusals."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch.errors import CompositionError, ParameterError
from anybatch.parallel.local_parts import is_dtensor, is_whole, ranks_of
from anybatch.parallel.strategy import Capabilities, ParameterLayout
from anybatch.parallel.world import World


def already_sharded(modules: nn.Module) -> bool:
    """Return whether the user has called `fully_shard` on a part of the model."""
    # Checks a method that FSDP2 adds: importing its class takes two seconds.
    return any(hasattr(module, "set_requires_gradient_sync") for module in modules.modules())


def layout_of(modules: nn.Module) -> ParameterLayout:
    """Return the layout of the parameters: replicas, or some of them in parts over the processes of a rank."""
    if not any(map(is_dtensor, modules.parameters())):
        return ParameterLayout()
    from anybatch.parallel.dtensors import SHARDED  # noqa: PLC0415 (with `DTensor`s it is imported already)

    return SHARDED


def refuse_misplaced(modules: nn.Module, needs: Capabilities, world: World, precision: str) -> None:
    """Refuse parameters that are split over ranks which the engine would treat as replicas.

    Raises:
        ParameterError: a parameter is split over data-parallel ranks, other than by `fully_shard` under "fsdp".
        CompositionError: the strategy or the precision does not support split parameters.
    """
    parts = {name: parameter for name, parameter in modules.named_parameters() if is_dtensor(parameter)}
    if not parts or (already_sharded(modules) and needs.replaces_parameters):
        return
    name = next(iter(parts))
    if already_sharded(modules):
        message = (
            f"parameter {name!r} is sharded over ranks (a DTensor), but strategy {needs.name!r} needs whole ones. Use "
            "strategy='fsdp', which takes models that were sharded with fully_shard, or pass the plain model."
        )
        raise ParameterError(message)
    along = set(world.data_groups[world.data_group])
    for name, parameter in parts.items():
        shared = sorted(along.intersection(ranks_of(parameter)))
        if len(shared) > 1:
            message = (
                f"parameter {name!r} is a DTensor over ranks {list(ranks_of(parameter))}. Of these, {shared} are "
                f"data-parallel ranks ({world.size} in all), so ranks that run one model together would get "
                "different samples. Tell the engine the data-parallel dimension of your mesh: "
                "Engine(..., world=ab.World.of_mesh(mesh['dp'])), where mesh = init_device_mesh(device, (num_replicas, "
                "num_parts), mesh_dim_names=('dp', 'tp')); with one replica too. A model sharded over data-parallel "
                "ranks is for fully_shard and strategy='fsdp'."
            )
            raise ParameterError(message)
    if not needs.tensor_parallel:
        message = (
            f"strategy {needs.name!r} does not take tensor-parallel parameters ({name!r} is a DTensor): torch's "
            "DistributedDataParallel cannot put them into buckets with plain ones, and 'single' compares nothing "
            "between processes. Use strategy='all_reduce', 'zero1' or 'fsdp'."
        )
        raise CompositionError(message)
    if precision == "fp16":
        message = (
            f"precision='fp16' does not take tensor-parallel parameters ({name!r} is a DTensor): torch's GradScaler "
            "would look for overflow in each process's parts alone. Use precision='bf16'."
        )
        raise CompositionError(message)


_WHOLE_UPDATES = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP"})
"""Optimizers whose update of a number depends on the other numbers of its parameter."""


def refuse_whole_updates(optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
    """Raise a `CompositionError` for an optimizer that needs whole parameters if each process has a part of them."""
    parts = {id(parameter) for parameter in updated if not is_whole(parameter)}
    for one in getattr(optimizer, "optimizers", (optimizer,)):
        names = _WHOLE_UPDATES.intersection(kind.__name__ for kind in type(one).__mro__)
        if names and any(id(parameter) in parts for group in one.param_groups for parameter in group["params"]):
            message = (
                f"{type(one).__name__} computes the update of a parameter from all of it, but each process has a part "
                "(a DTensor) of some: the sums would be rounded differently, or the step would fail. Use "
                "strategy='zero1', which updates each parameter as a whole on one rank, or an optimizer that updates "
                "each number independently, such as AdamW."
            )
            raise CompositionError(message)


def refuse_joined_kernels(optimizer: Optimizer, updated: Sequence[Tensor]) -> None:
    """Raise a `CompositionError` for one kernel (foreach, fused) over plain parameters and `DTensor`s.

    Torch does not support this mixture.
    """
    if len({is_dtensor(parameter) for parameter in updated}) < 2:  # noqa: PLR2004 (one kind)
        return
    for number, group in enumerate(optimizer.param_groups):
        named = next((name for name in ("foreach", "fused") if group.get(name)), None)
        if named is not None and len({is_dtensor(parameter) for parameter in group["params"]}) > 1:
            message = (
                f"{type(optimizer).__name__}({named}=True) updates the parameters of group {number} in one kernel, and "
                f"only some of them are DTensors, which torch refuses. Leave {named}=True out, or put the DTensors "
                "into a separate parameter group."
            )
            raise CompositionError(message)
