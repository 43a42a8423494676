"""DDP with a sampler: DistributedSampler repeats samples until every rank has equally many.

gradient = average over the ranks of d/dw (sum of the rank's losses * ranks / samples of the batch)
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DistributedSampler


def padded(num_samples: int, batch_size: int, epoch: int) -> list[Tensor]:
    """Return this rank's rows of each batch: as many on every rank, so that some run twice."""
    rows = torch.tensor(list(DistributedSampler(range(num_samples), seed=epoch)))
    return list(rows.split(batch_size // dist.get_world_size()))


def exact(num_samples: int, batch_size: int, epoch: int) -> list[Tensor]:
    """Return this rank's rows of each batch: none runs twice, so that some ranks run one less."""
    rows = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
    return [batch[dist.get_rank() :: dist.get_world_size()] for batch in rows.split(batch_size)]


def gradient(ddp: nn.Module, numbers: Tensor) -> Tensor:
    """Return the gradient of the batch of which this rank runs `numbers` and others the rest."""
    num_samples = torch.tensor(len(numbers))
    dist.all_reduce(num_samples)
    ddp.zero_grad()
    losses = (ddp(numbers)[:, 0] - numbers.sum(dim=1)).square()
    (losses.sum() * dist.get_world_size() / num_samples).backward()  # DDP divides by the ranks
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Learn to add eight numbers up as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    numbers = torch.randn(101, 8, generator=torch.Generator().manual_seed(0)).double()
    last_batch = torch.randperm(101, generator=torch.Generator().manual_seed(0))[96:]
    for deal in (padded, exact):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).double())
        whole = gradient(ddp, numbers[last_batch])  # when all ranks run all of it
        error = (gradient(ddp, numbers[deal(101, 32, 0)[-1]]) - whole).norm() / whole.norm()
        times_run = torch.bincount(torch.cat(deal(101, 32, 0)), minlength=101)
        dist.all_reduce(times_run)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for epoch in range(10):
            for rows in deal(101, 32, epoch):
                gradient(ddp, numbers[rows])
                optimizer.step()
        if rank == 0:
            print(f"{deal.__name__:6}  {times_run.sum()} of 101 run  last gradient off by {error:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
