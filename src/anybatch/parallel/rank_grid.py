"""Data-parallel ranks of several processes each: the division of a run's processes.

Under tensor parallelism the processes of a *model group* run one model together, on the same samples: they are one
data-parallel rank. The processes that hold the same part of the model, one of each model group, are a *data group*:
gradients are summed over it.

```text
                 model group of rank 0    of rank 1
data group 0     process 0                process 2
data group 1     process 1                process 3
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from anybatch.errors import WorldError


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The assignment of processes to data-parallel ranks.

    Attributes:
        process: this process, by its rank in the default group.
        mesh: the data-parallel dimension, as seen by this process.
        model_groups: by data-parallel rank, the processes that run its model together, one of each data group.
        data_group: index of this process's data group, and of the process in its model group.
    """

    process: int
    mesh: DeviceMesh
    model_groups: tuple[tuple[int, ...], ...]
    data_group: int

    @property
    def num_processes(self) -> int:
        """Number of processes of the run."""
        return sum(map(len, self.model_groups))

    @property
    def first_of_each(self) -> tuple[int, ...]:
        """The first process of each data-parallel rank, which represents the rank."""
        return tuple(group[0] for group in self.model_groups)


def data_dimension(mesh: DeviceMesh) -> tuple[int, tuple[int, ...]]:
    """Return this process's index in the one dimension of a mesh, and the processes along it."""
    if mesh.ndim != 1:
        message = (
            f"the mesh has {mesh.ndim} dimensions ({_named(mesh)}), but batches are dealt over one of them. Pass "
            "that one: World.of_mesh(mesh['dp'])."
        )
        raise WorldError(message)
    return mesh.get_local_rank(), tuple(dist.get_process_group_ranks(mesh.get_group()))


def make_grid(process: int, mesh: DeviceMesh, told: Sequence[tuple[int, tuple[int, ...]]]) -> RankGrid:
    """Return the grid of a run, from the results of `data_dimension` on each process of the default group, in order.

    Raises a `WorldError` if the processes' data-parallel dimensions are not slices of one mesh over all of them.
    """
    # Data groups are ordered by their first process, and processes within them by rank.
    lines = sorted({line for _, line in told})
    stands = [told[process] == (rank, line) for line in lines for rank, process in enumerate(line)]
    if len({len(line) for line in lines}) > 1 or len(stands) != len(told) or not all(stands):
        listed = "; ".join(str(list(line)) for line in lines)
        message = (
            f"the data-parallel dimensions of the {len(told)} ranks are not slices of one mesh over all ranks: "
            f"{listed}. Make one mesh (init_device_mesh('cuda', (num_replicas, num_parts), mesh_dim_names=('dp', "
            "'tp'))), and pass the same dimension of it on every rank."
        )
        raise WorldError(message)
    return RankGrid(process, mesh, tuple(zip(*lines, strict=True)), lines.index(told[process][1]))


def _named(mesh: DeviceMesh) -> str:
    names: Any = mesh.mesh_dim_names
    return ", ".join(map(repr, names)) if names else "without names"
