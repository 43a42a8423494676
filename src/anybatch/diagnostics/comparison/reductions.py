"""DDP whose reductions are counted."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anybatch.parallel.torch_internals import GradBucket


class CountedDDP:
    """Wraps a model in DDP, and counts the bytes that it hands to all-reduces. What it computes is what DDP does.

    Attributes:
        num_bytes: handed to collectives so far.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, model: nn.Module) -> nn.Module:
        """Return the wrapped model."""
        wrapper = DistributedDataParallel(model)
        wrapper.register_comm_hook(self, _counted)
        return wrapper


def _counted(counted: CountedDDP, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    counted.num_bytes += flat.numel() * flat.itemsize
    # As DDP itself does: divided first, then summed.
    work = dist.all_reduce(flat.div_(dist.get_world_size()), async_op=True)
    assert work is not None
    found: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return found
