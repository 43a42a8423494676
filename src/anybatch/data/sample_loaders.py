"""Loaders of single samples as streams: torch's `DataLoader`, and torchdata's stateful one."""

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from anybatch.errors import DataError


def yields_samples(loader: "DataLoader[Any]") -> bool:
    """Whether a loader yields samples, not batches: it was made with `batch_size=None` and no batch sampler."""
    return loader.batch_size is None and loader.batch_sampler is None


def check_loader(loader: "DataLoader[Any]", *, num_workers: int) -> None:
    """Raise a `DataError` unless a loader yields all of its samples from the beginning, the same on every rank."""
    if isinstance(loader.sampler, DistributedSampler):
        message = (
            "the loader has a DistributedSampler, and ab.batches gives each rank its share of every batch itself, so "
            "samples would be lost. Leave it out."
        )
        raise DataError(message)
    if getattr(loader.sampler, "generator", None) is not None or loader.generator is not None:
        message = (
            "the loader draws its order from its own generator, whose state a resumed run does not have; torchdata's "
            "loaders always do so if they shuffle. Pass the data set itself, which ab.batches shuffles in each epoch "
            "by its seed, or leave the generator, or shuffle=True, out."
        )
        raise DataError(message)
    if num_workers and loader.num_workers:
        message = (
            f"{num_workers=} would read a loader with {loader.num_workers} workers in workers, which cannot start any. "
            "Leave one of them out."
        )
        raise DataError(message)
    # torchdata's loader would begin at its saved state, and the samples before the run's position would be dropped
    # twice.
    if getattr(loader, "next_iter_state", None) is not None:
        message = (
            "the loader has been given a state (load_state_dict), but ab.batches continues at the "
            "engine's position. Leave it out: engine.load restores the position in samples, at any world size."
        )
        raise DataError(message)
