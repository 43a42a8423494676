"""All-reduce: each rank runs its share of a batch on its replica; the gradients are summed.

gradient = sum over the ranks of d/dw (sum of the losses of the rank's share / samples of the batch)

A linear layer learns to add eight numbers. 33 samples on 2 ranks are shares of 17 and 16.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn


def losses(model: nn.Module, numbers: Tensor) -> Tensor:
    """Return the squared error of the model's sum for each row of numbers."""
    return (model(numbers)[:, 0] - numbers.sum(dim=1)).square()


def gradient(model: nn.Module, numbers: Tensor, *, exact: bool) -> Tensor:
    """Return the gradient of the batch (exact), or a mean of the ranks' means, on every rank."""
    model.zero_grad()
    share = numbers[dist.get_rank() :: dist.get_world_size()]
    divisor = len(numbers) if exact else len(share) * dist.get_world_size()
    (losses(model, share).sum() / divisor).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # p.grad becomes the sum of all ranks' p.grad
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train as one of the ranks, and compare with the gradient of the unsplit batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    for name, exact in ("sum over count", True), ("mean of means", False):
        torch.manual_seed(0)  # every rank starts with the same parameters
        model = nn.Linear(8, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(51):
            numbers = torch.randn(33, 8, generator=torch.Generator().manual_seed(step)).double()
            loss = losses(model, numbers).mean()
            whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
            found = gradient(model, numbers, exact=exact)
            if rank == 0 and step in (0, 50):
                error = (found - whole).norm() / whole.norm()
                print(f"{name:14}  step {step:2}  loss {loss:.1e}  gradient error {error:.1e}")
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
