"""Other ranks, imagined: collectives return at once, and what is asked of other ranks they answer as this one would."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from anybatch.errors import CannotPlanError
from anybatch.parallel.world import World


@contextmanager
def imagined_ranks(size: int) -> Iterator[World]:
    """Be rank 0 of `size` ranks without starting another process.

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
    # Only these two modules of torch know the "fake" backend and what its collectives do to tensors without data.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    hook = sys.excepthook  # torch puts one of its own before it, and leaves it there: "[rank0]:" before each line
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield World(rank=0, size=size)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
