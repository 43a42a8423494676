"""The user's own loader, one per rank: ranks agree when it ends, and a rank that is done first brings nothing."""

import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, cast

from torch.utils.data import DistributedSampler

from anybatch.engine.accumulation.planned_batch import RankShare
from anybatch.parallel.world import World


def shares(loader: Iterable[Any], *, world: World | None = None) -> Iterator[RankShare]:
    """Yield what this rank's loader yields, for as long as any rank's loader does.

    The plain loop `for batch in loader` hangs when ranks have different numbers of batches: those that are done leave
    the others waiting in a reduction. Here a rank that is done brings empty shares until all are.

    Args:
        loader: yields nested batches of any size, this rank's share of each step.
        world: the ranks; None asks the environment.

    Raises:
        RankFailedError: another rank ended, because its loader raised, say; what a rank's own loader raises is raised
            there as it is.

    Warns:
        UserWarning: the loader's sampler pads with duplicates, so that some samples would count twice.
    """
    _warn_of_duplicates(loader)
    if world is not None:
        yield from _agreed_shares(loader, world)
        return
    with World.from_environment() as own:
        yield from _agreed_shares(loader, own)


def _agreed_shares(loader: Iterable[Any], world: World) -> Iterator[RankShare]:
    batches = iter(loader)
    while True:
        try:
            share = RankShare(next(batches, None))
        except Exception as error:
            # The other ranks wait in the gather below, where they will see no more than a broken connection.
            world.publish_failure(error, None)
            raise
        # Every rank asks in every step, also one that is done: the others would wait for its answer.
        more = world.gather_numbers([float(share.batch is not None)])
        if not any(row[0] for row in more):
            return
        yield share


def _warn_of_duplicates(loader: Iterable[Any]) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        if not isinstance(sampler, DistributedSampler):
            continue
        num_samples = len(cast("Sized", sampler.dataset))
        extra = sampler.total_size - num_samples
        if extra > 0:
            warnings.warn(
                f"DistributedSampler pads {num_samples} samples with {extra} duplicates so that "
                f"{sampler.num_replicas} ranks get {sampler.num_samples} each: those samples count twice in every "
                "epoch. Use ab.batches, which deals uneven shares, or DistributedSampler(drop_last=True) to drop "
                "the rest.",
                stacklevel=3,
            )
        return
