"""The parameter check: summed gradients keep replicas equal only if they start equal.

replicas are equal = every rank has the same digest = sha256(the bytes of all parameters)
"""

import tempfile
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import nn


def digests(model: nn.Module) -> list[str]:
    """Return every rank's digest of its parameters, in rank order."""
    row = nn.utils.parameters_to_vector(model.parameters()).detach()
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, sha256(bytes(row.view(torch.uint8).tolist())).hexdigest()[:8])
    return found


def align(model: nn.Module) -> None:
    """Give every rank the parameters of rank 0, unless all ranks already have them."""
    if len(set(digests(model))) > 1:
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)


def train(model: nn.Module) -> None:
    """Train the model to add eight numbers; ranks run shares and sum their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(200):
        numbers = torch.randn(33, 8, generator=torch.Generator().manual_seed(step)).double()
        share = numbers[dist.get_rank() :: dist.get_world_size()]
        losses = (model(share)[:, 0] - share.sum(dim=1)).square()
        model.zero_grad()
        (losses.sum() / len(numbers)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train, align and train again as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    torch.manual_seed(rank)  # every rank starts with different parameters
    model = nn.Linear(8, 1).double()
    for act in (train, align, train):
        act(model)
        found, answer = digests(model), model(torch.ones(8).double()).item()
        if rank == 0:
            print(f"{act.__name__}: digests {' '.join(found)}, rank 0 adds 8 ones to {answer:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
