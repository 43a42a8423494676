"""torch's DDP, whose reductions are watched."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.core.records import SpanEvent
from anybatch.parallel.torch_internals import GradBucket

OnBucket = Callable[[int, int, SpanEvent], None]
"""Told (number of the bucket, its bytes, "begin") when it is sent, and (..., "end") when it has been summed."""


class WatchedDDP:
    """Wraps a model in DDP and records its all-reduces, without changing the computation."""

    def __init__(self, on_bucket: OnBucket, *, bucket_bytes: int = 25 * 2**20) -> None:
        self.on_bucket = on_bucket
        self._bucket_bytes = bucket_bytes

    def __call__(self, model: nn.Module) -> DistributedDataParallel:
        """Return the wrapped model."""
        wrapper = DistributedDataParallel(model, bucket_cap_mb=self._bucket_bytes / 2**20)
        wrapper.register_comm_hook(self, _reduced)
        return wrapper


def _reduced(watched: WatchedDDP, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    number, flat = bucket.index(), bucket.buffer()
    num_bytes = flat.numel() * flat.itemsize
    watched.on_bucket(number, num_bytes, "begin")
    # As DDP itself does: divided first, then summed.
    work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
    assert work is not None

    def end(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        watched.on_bucket(number, num_bytes, "end")
        return future.value()[0]

    found: torch.futures.Future[torch.Tensor] = work.get_future().then(end)
    return found
