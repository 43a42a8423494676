"""What can be cut anywhere is run in halves where it does not fit, by each rank for itself: evaluation."""

import gc
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from anybatch.core.geometry import ceil_div
from anybatch.errors import DoesNotFitError

T = TypeVar("T")


class Halving:
    """Runs samples in pieces, smaller ones once memory has run out. What it has found to fit it keeps to.

    Right where nothing is changed before a piece is over and no other rank is waited for.

    Args:
        device: whose memory is meant.
        alone: no other rank takes part in what is run. Otherwise nothing is cut, and running out of memory is an error.
        tell: told of each time, with the size that did not fit and the one that comes next.
    """

    def __init__(self, device: torch.device, tell: Callable[[int, int], None], *, alone: bool) -> None:
        self._device = device
        self._alone = alone
        self._tell = tell
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
                    raise DoesNotFitError(message) from error
                let_go(error)
            else:
                start += size
                yield found
                continue
            make_room(self._device)  # outside of the handler, with the failed frames gone
            self._most = ceil_div(size, 2)
            self._tell(size, self._most)


def let_go(error: BaseException | None) -> None:
    """Let go of all that the frames of an error hold, and those of the errors it came from: tensors above all."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def make_room(device: torch.device) -> None:
    """Let go of what only cycles of references still hold, and give cached memory back."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
