"""Device meshes over all ranks: the groups in which shards are gathered, and replicas reduced."""

from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anybatch.core.torch_internals import outside_modes

# Meshes keep their default group alive, so `forget_meshes` has to end them together with it.
_MESHES: Final[dict["dist.ProcessGroup", dict[tuple[str, tuple[int, ...]], DeviceMesh]]] = {}


def mesh_of_ranks(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape; the same one for all models, as long as the ranks are connected.

    A mesh of several axes has process groups of its own. They end with the default group: torch remembers meshes with
    what it has worked out for tensors on them, and would look for the groups of one that has ended.

    Args:
        kind: of device, such as "cuda".
        shape: ranks along each axis; those of the last one follow each other.
        names: of the axes.
    """
    assert dist.group.WORLD is not None, "the ranks are connected"
    if dist.group.WORLD not in _MESHES:
        forget_meshes()  # of a group that the user has destroyed
    meshes = _MESHES.setdefault(dist.group.WORLD, {})
    if (kind, shape) not in meshes:
        # A plan makes it among tensors without data, and a mesh reads numbers from its own.
        with outside_modes():
            meshes[kind, shape] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return meshes[kind, shape]


def forget_meshes() -> None:
    """Release all meshes, before the default group ends: it would stay alive, with threads and sockets."""
    _MESHES.clear()
