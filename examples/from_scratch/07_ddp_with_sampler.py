"""DDP with a sampler: DistributedSampler repeats samples so that all ranks have the same number.

gradient = average over the ranks of d/dw (sum of the rank's losses * ranks / samples of the batch)
"""

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn


def padded(num_samples: int, batch_size: int) -> list[Tensor]:
    """Return this rank's rows of each batch: equally many on every rank, some repeated."""
    sampler = torch.utils.data.DistributedSampler(range(num_samples), shuffle=False)
    return list(torch.tensor(list(sampler)).split(batch_size // dist.get_world_size()))


def exact(num_samples: int, batch_size: int) -> list[Tensor]:
    """Return this rank's rows of each batch: none is repeated, so some ranks run one fewer."""
    batches = torch.arange(num_samples).split(batch_size)
    return [rows[dist.get_rank() :: dist.get_world_size()] for rows in batches]


def gradient(ddp: nn.Module, numbers: Tensor) -> Tensor:
    """Return the gradient of a batch; this rank runs `numbers`, the other ranks the rest of it."""
    dist.all_reduce(num_samples := torch.tensor(len(numbers)))
    ddp.zero_grad()
    losses = (ddp(numbers)[:, 0] - numbers.sum(dim=1)).square()
    (losses.sum() * dist.get_world_size() / num_samples).backward()  # DDP divides by the ranks
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train a model to add eight numbers, as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    numbers = torch.randn(101, 8, generator=torch.Generator().manual_seed(0)).double()
    for deal in (padded, exact):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 1).double())
        shares = deal(101, 30)
        whole = gradient(ddp, numbers[90:])  # the reference: every rank runs the whole batch
        error = (gradient(ddp, numbers[shares[-1]]) - whole).norm() / whole.norm()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for rows in shares * 10:
            gradient(ddp, numbers[rows])
            optimizer.step()
        if rank == world_size - 1:
            print(f"{deal.__name__:6}  last rows {shares[-1].tolist()}  gradient error {error:.1e}")
    del ddp
    gc.collect()  # delete DDP before its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
