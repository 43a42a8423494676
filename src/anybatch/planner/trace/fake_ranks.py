"""A fake process group: collectives return at once, as if all other ranks had the values of this one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from anybatch.errors import CannotPlanError
from anybatch.parallel.world import World
from anybatch.planner.torch_internals import imagined_store


@contextmanager
def fake_ranks(size: int, device_bytes: int | None = None) -> Iterator[World]:
    """Be rank 0 of `size` ranks without starting another process.

    Args:
        size: number of ranks.
        device_bytes: memory of each rank's device; None where it is not limited by one.

    Raises:
        CannotPlanError: this process is a rank of real ones already.
    """
    if size == 1:
        yield World()
        return
    if dist.is_initialized():
        message = (
            f"cannot plan, will probe: a step on {size} ranks is planned with imagined ones, and this process is rank "
            f"{dist.get_rank()} of {dist.get_world_size()} real ones. Plan before the process group is made, or in "
            "another process."
        )
        raise CannotPlanError(message)
    hook = sys.excepthook  # torch puts one of its own before it, and leaves it there: "[rank0]:" before each line
    # Collectives on this backend return at once without communicating, so sharded code runs on one process.
    dist.init_process_group("fake", rank=0, world_size=size, store=imagined_store())
    try:
        yield World(rank=0, size=size, device_bytes=device_bytes)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
