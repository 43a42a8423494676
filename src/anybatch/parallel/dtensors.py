"""Parameters that are `DTensor`s: how they are gathered, laid out and measured."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from anybatch.parallel.strategy import ParameterLayout, total_norm


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(tensor: Tensor) -> Tensor:
    """Return a sharded tensor in one piece, on every rank; others are whole. A collective."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded shards are in the host's memory, and their mesh talks from device to device.
    placed: DTensor = tensor.to(tensor.device_mesh.device_type)  # type: ignore[assignment]
    return placed.full_tensor().to(tensor.device)


def scatter(whole: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, laid out like another. No collective: each rank takes its part of what it has."""
    if not isinstance(like, DTensor):
        return whole
    placed = whole.to(like.device_mesh.device_type)
    made = distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)
    return made.to(like.device)


def norm_over_shards(gradients: Sequence[Tensor]) -> Float[Tensor, ""]:
    """Return the 2-norm over gradients of all ranks, as a plain tensor: each number counts once."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    # What lies on different meshes is in no single sum of torch's; their norms are.
    norms = [gather(total_norm(together)) for together in by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


SHARDED = ParameterLayout(local=local, gather=gather, scatter=scatter, norm=norm_over_shards)
"""The layout of parameters some or all of which are `DTensor`s."""
