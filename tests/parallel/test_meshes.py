"""Device meshes belong to the ranks that are connected."""

import pytest

from anybatch.parallel.meshes import mesh_of_ranks
from tests.faults import sees
from tests.parallel import worlds_in_processes as ranks_do
from tests.ranks_fixture import Ranks


def two_meshes() -> tuple[bool, bool]:
    """Run on every rank: return whether asking twice gives one mesh, and whether another shape gives another."""
    mesh = mesh_of_ranks("cpu", (2,), ("shard",))
    return mesh_of_ranks("cpu", (2,), ("shard",)) is mesh, mesh_of_ranks("cpu", (1, 2), ("replicate", "shard")) is mesh


@sees(
    "every engine makes groups of its own",
    "src/anybatch/parallel/meshes.py",
    "    if (kind, shape) not in meshes:",
    "    if True:",
)
@pytest.mark.ranks
def test_a_mesh_is_made_once() -> None:
    """All engines of connected ranks share the mesh of a shape, so that fifty of them leave no fifty groups behind."""
    ranks = Ranks(2)
    try:
        assert ranks.run(two_meshes) == [(True, False)] * 2
    finally:
        ranks.close()


@sees(
    "meshes: a closed engine's default group stays",
    "src/anybatch/parallel/process_groups.py",
    "    forget_meshes()\n",
    "",
)
@pytest.mark.ranks
@pytest.mark.slow
def test_a_closed_engine_leaves_no_group() -> None:
    """The default group that an engine started ends with it, although the shards of its model were on a mesh."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks_do.free_port())}
    for before, after in ranks_do.by_launcher(ranks_do.sharded_and_closed, variables, 2):
        assert after.within(before)
