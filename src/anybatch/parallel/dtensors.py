"""Operations on `DTensor`s, which are sharded over ranks, as under `fsdp`: local parts, gathering, layout and norms.

torch's module for them is only imported if there is a `DTensor`, because the import takes a second.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from anybatch.parallel.strategy import ParameterLayout, total_norm
from anybatch.parallel.torch_internals import local_offset


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a `DTensor`, with a part on each rank of its mesh."""
    return hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is on this rank, as a detached view of the same memory."""
    if not is_dtensor(tensor):
        return tensor
    part: Tensor = cast("Any", tensor.detach()).to_local()
    return part


def is_whole(tensor: Tensor) -> bool:
    """Return whether this rank has the whole tensor: true for plain tensors and for replicated `DTensor`s."""
    return not is_dtensor(tensor) or all(placement.is_replicate() for placement in cast("Any", tensor).placements)


def gather(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as a whole one, on every rank (a collective); return a plain tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Replicate  # noqa: PLC0415 (see above)

    # Offloaded shards are in host memory, and their mesh communicates between devices.
    placed: Any = tensor.to(cast("Any", tensor).device_mesh.device_type)
    # One dimension at a time: torch gathers several sequentially anyway, and warns.
    for dim in range(placed.device_mesh.ndim):
        placements = [Replicate() if other == dim else p for other, p in enumerate(placed.placements)]
        placed = placed.redistribute(placements=placements)
    whole: Tensor = placed.to_local().to(tensor.device)
    return whole


def _scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor like the tensor `like`, without a collective: each rank takes its part."""
    if not is_dtensor(like):
        return whole
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (see above)

    sharded: Any = like
    placed = whole.to(sharded.device_mesh.device_type)
    return distribute_tensor(placed, sharded.device_mesh, sharded.placements, src_data_rank=None).to(like.device)


def _with_local_part(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is sharded like `like` and has the local part `part`, whose memory it shares."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (see above)

    sharded: Any = like
    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def norm_over_shards(gradients: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Return the 2-norm of all gradients over all ranks, as a plain tensor; replicated elements count once.

    In plain PyTorch: `sum(g.full_tensor().square().sum() for g in gradients).sqrt()`.
    """
    by_dimensions: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        placed = enumerate(cast("Any", gradient).placements) if is_dtensor(gradient) else []
        dimensions = tuple((cast("Any", gradient).device_mesh, dim) for dim, p in placed if not p.is_replicate())
        by_dimensions[dimensions].append(local_part(gradient))
    squares = []
    for dimensions, parts in by_dimensions.items():
        norm = total_norm(parts)
        # In at least float32, to avoid overflow of squares.
        square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
        for mesh, dim in dimensions:
            square = square.to(mesh.device_type)  # offloaded parts are in host memory
            dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


SHARDED = ParameterLayout(
    in_parts=True,
    local=local_part,
    gather=gather,
    scatter=_scatter,
    offset=lambda tensor: local_offset(tensor) if is_dtensor(tensor) else None,
    with_local=_with_local_part,
    norm=norm_over_shards,
)
"""The layout of a model in which some or all parameters are `DTensor`s."""
