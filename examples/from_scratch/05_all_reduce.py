"""All-reduce: ranks run shares of one batch on replicas of one model, then sum their gradients.

gradient = sum over the ranks of d/dw (sum of the losses of the rank's share / samples of the batch)
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.nn.functional import cross_entropy


def spirals(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of the plane, and on which of two spiral arms each of them lies."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(num_samples, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def gradient(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the batch on every rank, though each runs its share of it only."""
    model.zero_grad()
    share = torch.arange(len(labels))[dist.get_rank() :: dist.get_world_size()]
    loss_sum = cross_entropy(model(points[share]), labels[share], reduction="sum")
    (loss_sum / len(labels)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # in place: the sum over all ranks
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(201):
        points, labels = spirals(33, seed=step)
        loss = cross_entropy(model(points), labels)  # of the whole batch, for comparison only
        whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
        error = (gradient(model, points, labels) - whole).norm() / whole.norm()
        if rank == 0 and step % 100 == 0:
            print(f"step {step:3}  loss {loss:.3f}  gradient error {error:.1e}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
