"""Device meshes are cached per set of connected ranks."""

import pytest

from anybatch.parallel.control import mesh_of_ranks
from tests.parallel import worlds_in_processes as ranks_do
from tests.ranks_fixture import Ranks


def two_meshes() -> tuple[bool, bool]:
    """Run on every rank: return whether the same shape gives the same mesh, and whether another shape does too."""
    mesh = mesh_of_ranks("cpu", (2,), ("shard",))
    return mesh_of_ranks("cpu", (2,), ("shard",)) is mesh, mesh_of_ranks("cpu", (1, 2), ("replicate", "shard")) is mesh


@pytest.mark.ranks
def test_a_mesh_is_made_once() -> None:
    """Engines of connected ranks share the mesh of a shape, so that fifty engines do not leave fifty groups."""
    ranks = Ranks(2)
    try:
        assert ranks.run(two_meshes) == [(True, False)] * 2
    finally:
        ranks.close()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_closed_engine_leaves_no_group() -> None:
    """Closing an engine ends the default group that it started, although its model was sharded on a mesh."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ranks_do.free_port())}
    for before, after in ranks_do.by_launcher(ranks_do.sharded_and_closed, variables, 2):
        assert after.within(before)
