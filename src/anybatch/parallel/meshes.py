"""Device meshes over all ranks: the groups for gathering shards and reducing replicas."""

from typing import Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anybatch.core.torch_internals import outside_modes

# Meshes keep their default group alive, so `forget_meshes` has to end them together with it.
_MESHES: Final[dict["dist.ProcessGroup", dict[tuple[str, tuple[int, ...]], DeviceMesh]]] = {}


def mesh_of_ranks(kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of this shape and device type ("cuda"), shared by all models while the ranks are connected.

    A mesh with several axes has its own process groups, which end with the default group: torch caches meshes and data
    derived from them, and would otherwise look up groups that have ended. Ranks along the last axis are consecutive.
    """
    assert dist.group.WORLD is not None, "the ranks are connected"
    if dist.group.WORLD not in _MESHES:
        forget_meshes()  # a group that the user has destroyed
    meshes = _MESHES.setdefault(dist.group.WORLD, {})
    if (kind, shape) not in meshes:
        # A plan calls this under fake tensors, but a mesh reads numbers from its tensors.
        with outside_modes():
            meshes[kind, shape] = init_device_mesh(kind, shape, mesh_dim_names=names)
    return meshes[kind, shape]


def forget_meshes() -> None:
    """Release all meshes before the default group ends, or they would keep it alive, with threads and sockets."""
    _MESHES.clear()
