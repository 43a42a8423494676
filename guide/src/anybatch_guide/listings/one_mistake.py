"""One mistake: accumulation in plain PyTorch, with one of three common mistakes.

python -m anybatch_guide.listings.one_mistake no_division 16       four micro-batches; their means are added
python -m anybatch_guide.listings.one_mistake clip_each 16         clipped after each micro-batch
python -m anybatch_guide.listings.one_mistake mean_of_means 21     21 + 21 + 21 + 1 samples: the last counts 21 times
torchrun --nproc-per-node 2 -m anybatch_guide.listings.one_mistake no_division 8
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anybatch_guide.listings.one_batch import make_model, spirals

CLIP = 0.05


def gradient(model: nn.Module, points: Tensor, arms: Tensor, size: int, mistake: str) -> None:
    """Compute the gradient of this rank's share in `p.grad`; with mistake "" it is correct."""
    model.zero_grad()
    micro_batches = torch.arange(len(arms)).split(size)
    for rows in micro_batches:
        if mistake == "no_division":
            loss = cross_entropy(model(points[rows]), arms[rows])
        elif mistake in ("mean_of_means", "clip_each"):
            loss = cross_entropy(model(points[rows]), arms[rows]) / len(micro_batches)
        else:
            loss = cross_entropy(model(points[rows]), arms[rows], reduction="sum") / len(arms)
        loss.backward()
        if mistake == "clip_each":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def train(size: int, mistake: str) -> list[float]:
    """Return the loss of the 64 points before each of 60 steps."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, (points, arms) = make_model(torch.float64), spirals()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    share = torch.arange(64).chunk(num_ranks)[rank]
    losses = []
    for _ in range(60):
        with torch.no_grad():
            losses.append(float(cross_entropy(model(points), arms)))
        gradient(model, points[share], arms[share], size, mistake)
        for p in model.parameters():
            if num_ranks > 1 and p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= num_ranks  # the mean over ranks, as in DDP
        optimizer.step()
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    losses = train(int(sys.argv[2]), sys.argv[1])
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*(f"{loss:.17g}" for loss in losses))
    if dist.is_initialized():
        dist.destroy_process_group()
