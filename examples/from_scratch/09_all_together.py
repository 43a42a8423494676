"""All together: ragged micro-batches, masked targets, accumulation, ranks, clipping, a schedule.

gradient = sum over ranks and micro-batches of d/dw (sum of losses) / sum of their target counts
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn  # if imported after init_process_group, it keeps the group alive
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def text(num_sentences: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sentences that count up by 1 or 2, and the next tokens as labels, padded with -100."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (num_sentences, 1), generator=random)
    tokens = torch.randint(1, 3, (num_sentences, 25), generator=random).cumsum(dim=1) % 8
    return tokens[:, :-1], tokens[:, 1:].where(torch.arange(24) < lengths, -100)


def gradient(model: nn.Module, tokens: Tensor, labels: Tensor, size: int) -> Tensor:
    """Set `p.grad` to the gradient of the batch on every rank; return it as one vector."""
    share = torch.arange(len(labels))[dist.get_rank() :: dist.get_world_size()]
    model.zero_grad()
    for rows in share.split(size):
        cross_entropy(model(tokens[rows]).mT, labels[rows], reduction="sum").backward()
    sums = [p.grad.flatten() for p in model.parameters()] + [(labels[share] != -100).sum()[None]]
    dist.all_reduce(message := torch.cat(sums))  # the only reduction in the step
    row, gradients = message[:-1] / message[-1], [p.grad for p in model.parameters()]
    nn.utils.vector_to_parameters(row, gradients)
    return row


def run_rank(rank: int, world_size: int, meeting: str) -> None:
    """Train as one of the ranks; clip and set the learning rate once per step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for step in range(101):
        tokens, labels = text(33, seed=step)
        loss = cross_entropy(model(tokens).mT, labels)
        whole = torch.cat([g.flatten() for g in torch.autograd.grad(loss, model.parameters())])
        error = (gradient(model, tokens, labels, size=4) - whole).norm() / whole.norm()
        if rank == 0 and step % 100 == 0:
            print(f"step {step:3}  loss {loss:.3f} per target  gradient error {error:.1e}")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # ranks meet in a file there
        torch.multiprocessing.spawn(run_rank, (2, f"file://{folder}/ranks"), nprocs=2)
