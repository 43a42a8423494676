"""A fake process group: collectives return immediately, as if all ranks had the same values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from anybatch.errors import CannotPlanError
from anybatch.parallel.world import World
from anybatch.planner.torch_internals import imagined_store


@contextmanager
def fake_ranks(size: int, device_bytes: int | None = None) -> Iterator[World]:
    """Make this process rank 0 of `size` ranks without starting other processes.

    Args:
        size: number of ranks.
        device_bytes: memory of each rank's device; None for no limit.

    Raises:
        CannotPlanError: this process already belongs to a process group.
    """
    if size == 1:
        yield World()
        return
    if dist.is_initialized():
        message = (
            f"cannot plan, will probe: planning {size} ranks needs a fake process group, but this process is rank "
            f"{dist.get_rank()} of a real one with {dist.get_world_size()} ranks. Plan before init_process_group, or "
            "in another process."
        )
        raise CannotPlanError(message)
    hook = sys.excepthook  # torch replaces it by a hook that prints "[rank0]:", and never restores it
    dist.init_process_group("fake", rank=0, world_size=size, store=imagined_store())
    try:
        yield World(rank=0, size=size, device_bytes=device_bytes)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
