"""DDP with a sampler: DistributedSampler repeats samples until every rank has equally many.

gradient = average over the ranks of d/dw (sum of the rank's losses * ranks / samples of the batch)
"""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn


def padded(num_samples: int, batch_size: int) -> list[Tensor]:
    """Return this rank's rows of each batch: as many on every rank, so that some run twice."""
    sampler = torch.utils.data.DistributedSampler(range(num_samples), shuffle=False)
    return list(torch.tensor(list(sampler)).split(batch_size // dist.get_world_size()))


def exact(num_samples: int, batch_size: int) -> list[Tensor]:
    """Return this rank's rows of each batch: none runs twice, so that some ranks run one less."""
    batches = torch.arange(num_samples).split(batch_size)
    return [rows[dist.get_rank() :: dist.get_world_size()] for rows in batches]


def gradient(ddp: nn.Module, numbers: Tensor) -> Tensor:
    """Return the gradient of the batch of which this rank runs `numbers` and others the rest."""
    dist.all_reduce(num_samples := torch.tensor(len(numbers)))
    ddp.zero_grad()
    losses = (ddp(numbers)[:, 0] - numbers.sum(dim=1)).square()
    (losses.sum() * dist.get_world_size() / num_samples).backward()  # DDP divides by the ranks
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Learn to add eight numbers up as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    numbers = torch.randn(101, 8, generator=torch.Generator().manual_seed(0)).double()
    for deal in (padded, exact):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).double())
        shares = deal(101, 30)
        whole = gradient(ddp, numbers[90:])  # what comes out if every rank runs all of it
        error = (gradient(ddp, numbers[shares[-1]]) - whole).norm() / whole.norm()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for rows in shares * 10:
            gradient(ddp, numbers[rows])
            optimizer.step()
        if rank == world_size - 1:
            print(f"{deal.__name__:6}  last rows {shares[-1].tolist()}  gradient error {error:.1e}")
    del ddp
    gc.collect()  # DDP has to be gone before its process group is
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
