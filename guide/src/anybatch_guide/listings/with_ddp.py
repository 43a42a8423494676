"""Accumulation with DDP: two ranks run two micro-batches of 16 each, with one reduction per step.

torchrun --nproc-per-node 2 -m anybatch_guide.listings.with_ddp
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def spirals(seed: int) -> tuple[Tensor, Tensor]:
    """Return 64 points, and the spiral arm of each: 0 or 1."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(64, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def train(rank: int, num_ranks: int) -> None:
    """Make three steps as one of the ranks."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DistributedDataParallel(network.double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        points, arms = spirals(seed=step)
        optimizer.zero_grad()
        summed = torch.zeros((), dtype=torch.float64)
        share = torch.arange(64).chunk(num_ranks)[rank].split(16)
        for number, rows in enumerate(share, start=1):
            last = number == len(share)
            with nullcontext() if last else model.no_sync():  # includes the forward
                logits = model(points[rows])
                loss_sum = cross_entropy(logits, arms[rows], reduction="sum")
                loss = loss_sum / 64
                (loss * num_ranks).backward()  # DDP divides by the number of ranks
            summed += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(summed)
        if rank == 0:
            print(f"step {step}  loss {summed:.12f}  norm {norm:.12f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    gc.collect()  # free DDP before its process group
    dist.destroy_process_group()
