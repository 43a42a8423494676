"""Samples that can be cut anywhere are run in halves where they do not fit, by each rank for itself: evaluation."""

import gc
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from anybatch.core.geometry import ceil_div
from anybatch.errors import DoesNotFitError

T = TypeVar("T")


class OomHalving:
    """Runs samples in pieces, smaller ones once memory has run out. A size that fits is kept.

    Right where nothing is changed before a piece is over and no other rank waits.

    Args:
        device: whose memory is meant.
        alone: no other rank takes part in what is run. Otherwise nothing is cut, and running out of memory is an error.
        notify: called each time, with the size that did not fit and the next one.
    """

    def __init__(self, device: torch.device, notify: Callable[[int, int], None], *, alone: bool) -> None:
        self._device = device
        self._alone = alone
        self._notify = notify
        self._most: int | None = None

    def run(self, num_samples: int, piece: Callable[[int, int], T]) -> Iterator[T]:
        """Yield what `piece(start, stop)` returns, for pieces that make up all samples.

        Raises:
            DoesNotFitError: a single sample does not fit.
        """
        start = 0
        while start < num_samples:
            size = min(self._most or num_samples, num_samples - start)
            try:
                found = piece(start, start + size)
            except torch.OutOfMemoryError as error:
                if not self._alone:
                    raise
                if size == 1:
                    message = f"not even 1 sample at a time fits into memory. torch says: {error}"
                    raise DoesNotFitError(message, micro_batch_size=1) from error
                # The failed frames still hold the tensors that filled the memory.
                release_frames(error)
            else:
                start += size
                yield found
                continue
            free_cached_memory(self._device)  # outside of the handler, with the failed frames gone
            self._most = ceil_div(size, 2)
            self._notify(size, self._most)


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of the errors it came from, so that the tensors in them are freed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def free_cached_memory(device: torch.device) -> None:
    """Collect cycles of references, and give memory that torch has cached back to the device."""
    # Before the cache is emptied: tensors in cycles are not free yet.
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
