"""no_sync: with accumulation under DDP, one reduction per step is enough instead of K.

bytes sent per step = bytes of the gradient * backward passes that reduce it
"""

import gc
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def counting_hook(sent: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over the ranks, as DDP does without a hook, and record their bytes."""
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(dist.group.WORLD, bucket)


def gradient(ddp: DistributedDataParallel, numbers: Tensor, size: int, around: str) -> Tensor:
    """Return the gradient of the batch, with no_sync around "forward", "backward" or both."""
    ddp.zero_grad()
    micro_batches = numbers[dist.get_rank() :: dist.get_world_size()].split(size)
    for count, rows in enumerate(micro_batches, start=1):
        quiet = ddp.no_sync if count < len(micro_batches) else nullcontext
        with quiet() if "forward" in around else nullcontext():
            loss_sum = (ddp(rows)[:, 0] - rows.sum(dim=1)).square().sum()
        with quiet() if "backward" in around else nullcontext():
            (loss_sum * dist.get_world_size() / len(numbers)).backward()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train a model to add eight numbers, as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    for around in ("nothing", "backward", "forward", "forward and backward"):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(8, 1).double())
        sent: list[int] = []
        ddp.register_comm_hook(sent, counting_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(20):
            numbers = torch.randn(33, 8, generator=torch.Generator().manual_seed(step)).double()
            norm = gradient(ddp, numbers, 5, around).norm()
            optimizer.step()
        if rank == 0:
            print(f"around {around:20} {sum(sent) // 20:4} bytes a step, last gradient {norm:.9f}")
    del ddp
    gc.collect()  # DDP has to be gone before its process group is
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
