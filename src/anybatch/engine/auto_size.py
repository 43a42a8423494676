"""A micro-batch size that fits, by doubling: what "auto" means on an accelerator until memory is planned."""

from collections.abc import Callable

import torch
from torch import nn

from anybatch.core.buffers import BufferValues
from anybatch.core.loss import shares_of, unit_counts
from anybatch.core.nested import Batch, slice_samples
from anybatch.core.randomness import BatchKey
from anybatch.core.splitting import Unit
from anybatch.engine.accumulate import Machine, Work
from anybatch.engine.feeding import OpenBatch, to_device
from anybatch.engine.joint import rehearse
from anybatch.errors import BatchSizeError, CompositionError
from anybatch.parallel.strategy import Turn
from anybatch.parallel.world import World


def search_micro_batch_size(
    machine: Machine,
    opened: OpenBatch,
    world: World,
    modules: nn.Module,
    *,
    clear: Callable[[], None],
    optimizer_is_new: bool,
) -> int:
    """Return a micro-batch size that fits on every rank, found by running micro-batches of the first effective batch.

    Each size runs two micro-batches, the second with gradients present, as accumulation does. Buffers, random numbers
    and gradients are as before afterwards. An optimizer that has no state yet will take more memory in its first step
    than was seen here, so half of the size found is returned then, unless the whole share fits.

    Raises:
        BatchSizeError: not even one sample fits.
        CompositionError: the strategy keeps ranks in lockstep, where one rank may not fail alone.
    """
    if machine.strategy.capabilities.lockstep:
        message = (
            f"micro_batch_size='auto' cannot search under strategy {machine.strategy.capabilities.name!r}: a rank that "
            "runs out of memory would leave the others waiting. Name a micro_batch_size."
        )
        raise CompositionError(message)
    share = next(opened.micro_batches, None)
    num_samples = opened.units[0].num_samples if opened.units else 0
    largest_share = max(sum(unit.num_samples for unit in units) for units in opened.plan.shares)

    def fits(size: int) -> bool:
        own = num_samples == 0 or _runs(
            machine,
            share,
            num_samples,
            size,
            world.device,
            modules=modules,
            clear=clear,
            num_in_batch=opened.plan.num_samples,
        )
        return all(row[0] for row in world.gather_numbers([float(own)]))

    size, limited = largest_that_fits(fits, largest_share)
    return max(1, size // 2) if limited and optimizer_is_new else size


def largest_that_fits(fits: Callable[[int], bool], upper: int) -> tuple[int, bool]:
    """Return the largest power of two, or `upper`, that fits, and whether a larger one was seen not to.

    It begins at 2, because one sample alone has no variance: BatchNorm refuses it in train mode.

    Args:
        fits: whether micro-batches of this size run; all ranks must answer alike.
        upper: the largest size of use, that of the largest rank share.

    Raises:
        BatchSizeError: a single sample does not fit.
    """
    size, found = min(2, upper), 0
    while fits(size):
        found = size
        if size == upper:
            return found, False
        size = min(2 * size, upper)
    if not found and size > 1 and fits(1):
        return 1, True
    if not found:
        message = (
            "micro_batch_size='auto' found that not even 1 sample fits into the device's memory. Use a smaller model, "
            "precision='bf16' or activation checkpointing."
        )
        raise BatchSizeError(message)
    return found, True


def _runs(
    machine: Machine,
    share: Batch,
    num_samples: int,
    size: int,
    device: torch.device,
    *,
    modules: nn.Module,
    clear: Callable[[], None],
    num_in_batch: int,
) -> bool:
    """Run two micro-batches of `size` and put everything back; False if memory ran out."""
    buffers = BufferValues(modules)
    ranges = [(start, min(start + size, num_samples)) for start in (0, size) if start < num_samples]
    pieces = (slice_samples(share, start, stop) for start, stop in ranges)
    work = []
    fitted = True
    try:
        for (start, stop), piece in zip(ranges, to_device(pieces, device), strict=True):
            counts = unit_counts(machine.loss, piece, stop - start)
            shares = shares_of(machine.loss, counts, counts, 1.0)
            if any(counts):
                key = BatchKey(0, 0, range(stop))
                work.append((Work(Unit(0, start, stop), shares, Turn(first=False, last=False), 0, key), piece))
        with machine.randomness:
            rehearse(machine, modules, work, num_in_batch)
    except torch.OutOfMemoryError:
        fitted = False
    # Outside of the handler, so that the failed frames and their tensors are gone before anything is retried.
    work.clear()
    clear()
    buffers.restore()
    if not fitted and device.type == "cuda":
        torch.cuda.empty_cache()
    return fitted
