"""Parameters that are `DTensor`s: gathering, layout and norms."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from anybatch.parallel.local_parts import local_part, with_local_part
from anybatch.parallel.strategy import ParameterLayout, total_norm
from anybatch.parallel.torch_internals import local_offset


def gather(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in one piece, on every rank (a collective); return others unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are in host memory, and their mesh communicates between devices.
    placed: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    # One dimension at a time: torch gathers several sequentially anyway, and warns.
    for dim in range(placed.device_mesh.ndim):
        placements = [Replicate() if place == dim else one for place, one in enumerate(placed.placements)]
        placed = placed.redistribute(placements=placements)
    return placed.to_local().to(tensor.device)


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor with the layout of another. No collective: each rank takes its part."""
    if not isinstance(like, DTensor):
        return whole
    placed = whole.to(like.device_mesh.device_type)
    made = distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
    return made.to(like.device)


def offset(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the start of a tensor's local part in the whole one; None for a plain tensor."""
    return local_offset(tensor) if isinstance(tensor, DTensor) else None


def norm_over_shards(gradients: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Return the 2-norm over gradients of all ranks, as a plain tensor: each number counts once.

    The plain loop: `sum(g.full_tensor().square().sum() for g in gradients).sqrt()`. Parts are summed only over the
    dimensions of their mesh along which they differ.
    """
    by_dimensions: dict[tuple[tuple[DeviceMesh, int], ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        cut = [] if not isinstance(gradient, DTensor) else enumerate(gradient.placements)
        dimensions = tuple((gradient.device_mesh, dim) for dim, one in cut if not one.is_replicate())  # type: ignore[attr-defined]
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
    return torch.stack([one.to(squares[0].device) for one in squares]).sum().sqrt()


SHARDED = ParameterLayout(
    in_parts=True,
    local=local_part,
    gather=gather,
    scatter=scatter,
    offset=offset,
    with_local=with_local_part,
    norm=norm_over_shards,
)
"""The layout of parameters of which some or all are `DTensor`s."""
