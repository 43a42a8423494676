"""Behind an error nothing stays half-done, and the other ranks learn the reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from anybatch.engine.compatibility import refused_in_backward
from anybatch.errors import AnyBatchError, MemoryExhaustedError, NonFiniteError, RankFailedError
from anybatch.parallel.world import World


@contextmanager
def failures_reported(world: World, step: int, undo: Callable[[], None]) -> Iterator[None]:
    """Leave nothing half-done behind an error, and report to the other ranks why this one stopped.

    Args:
        world: the ranks.
        step: its number.
        undo: called behind an error.

    Raises:
        RankFailedError: what broke was a collective that another rank has left.
        CompositionError: what broke is known not to compose.
    """
    try:
        yield
    except BaseException as error:
        # First, since every way from here raises.
        undo()
        if not isinstance(error, AnyBatchError):
            error.add_note(f"anybatch: in step {step} (counted from 0), on rank {world.rank} of {world.size}.")
        if (refused := refused_in_backward(error)) is not None:
            world.publish_failure(refused, step)
            raise refused from error
        _complete(error, world.rank, step)
        # A collective that another rank has left raises a RuntimeError here; the cause is that rank's own error.
        broken = isinstance(error, RuntimeError) and not isinstance(
            error, (RankFailedError, MemoryExhaustedError, torch.OutOfMemoryError)
        )
        if broken and world.published_failure():  # a collective inside a backward, most likely
            raise world.first_failure(error) from error
        world.publish_failure(error, step)
        raise


def _complete(error: BaseException, rank: int, step: int) -> None:
    """Fill in the fields that the place which raised could not know."""
    if isinstance(error, (MemoryExhaustedError, NonFiniteError)) and error.step is None:
        error.step = step
    if isinstance(error, MemoryExhaustedError) and error.rank is None:
        error.rank = rank
