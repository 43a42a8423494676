"""All-reduce: ranks run shares of one batch on replicas of one model, then sum their gradients.

gradient = sum over the ranks of d/dw (sum of the losses of the rank's share / samples of the batch)
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn


def losses(model: nn.Module, pairs: Tensor) -> Tensor:
    """Return how wrong the model is about the product of each pair of numbers."""
    return (model(pairs)[:, 0] - pairs.prod(dim=1)).square()


def gradient(model: nn.Module, pairs: Tensor, *, exact: bool) -> Tensor:
    """Return the gradient of the batch, or else a mean of the ranks' means, on every rank."""
    model.zero_grad()
    share = pairs[dist.get_rank() :: dist.get_world_size()]
    divisor = len(pairs) if exact else len(share) * dist.get_world_size()
    (losses(model, share).sum() / divisor).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # in place: p.grad is now the sum over all ranks
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train as one of the ranks, and compare with the un-split batch in every step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    for name, exact in ("sum over count", True), ("mean of means", False):
        torch.manual_seed(0)  # replicas are equal because every rank begins with this
        model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        worst = 0.0
        for step in range(300):
            pairs = torch.randn(33, 2, generator=torch.Generator().manual_seed(step)).double()
            loss = losses(model, pairs).mean()
            whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
            found = gradient(model, pairs, exact=exact)
            worst = max(worst, float((found - whole).norm() / whole.norm()))
            optimizer.step()
        if rank == 0:
            print(f"{name:14}  largest gradient error {worst:.1e}  last loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
