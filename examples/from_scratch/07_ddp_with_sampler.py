"""DDP with a sampler: DistributedSampler repeats samples until all ranks have equally many.

gradient = average over the ranks of d/dw (sum of the rank's losses * ranks / samples of the batch)
"""

import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler


def spirals(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of the plane, and on which of two spiral arms each of them lies."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(num_samples, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def padded_shares(num_samples: int, batch_size: int, epoch: int) -> list[list[int]]:
    """Return this rank's samples, batch by batch, as usual: the last batches are filled up."""
    sampler = DistributedSampler(range(num_samples))
    sampler.set_epoch(epoch)
    return list(BatchSampler(sampler, batch_size // dist.get_world_size(), drop_last=False))


def exact_shares(num_samples: int, batch_size: int, epoch: int) -> list[list[int]]:
    """Return this rank's samples, batch by batch, each sample on one rank only."""
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
    return [batch[rank::world].tolist() for batch in order.split(batch_size)]


def gradient(ddp: nn.Module, points: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the gradient of a batch of `count` samples, of which this rank has a share."""
    ddp.zero_grad()
    loss_sum = cross_entropy(ddp(points), labels, reduction="sum")
    (loss_sum * dist.get_world_size() / count).backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
