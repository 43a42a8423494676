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
    """Return sentences from short to long, and as labels what follows: -100 after their end."""
    chains = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).mul(2).softmax(dim=2)
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (num_sentences,), generator=random).sort().values
    tokens = torch.randint(8, (num_sentences, 25), generator=random)
    for t in range(24):  # one Markov chain makes the short sentences, another one the long
        odds = chains[(lengths > 12).long(), tokens[:, t]]
        tokens[:, t + 1] = odds.multinomial(1, generator=random)[:, 0]
    return tokens[:, :-1], tokens[:, 1:].where(torch.arange(24) < lengths[:, None], -100)


def make_model() -> nn.Module:
    """Return a network that guesses each next token from the one before it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


def gradient(model: nn.Module, tokens: Tensor, labels: Tensor, size: int) -> Tensor:
    """Leave the gradient of the batch in `p.grad`, the same on every rank; return it in one row."""
    share = torch.arange(len(labels))[dist.get_rank() :: dist.get_world_size()]
    model.zero_grad()
    for rows in share.split(size):
        loss_sum = cross_entropy(model(tokens[rows]).mT, labels[rows], reduction="sum")
        loss_sum.backward()
    num_targets = (labels[share] != -100).sum()
    message = torch.cat([p.grad.flatten() for p in model.parameters()] + [num_targets[None]])
    dist.all_reduce(message)  # the only one in the step
    row = message[:-1] / message[-1]  # sums everywhere, one division
    for p, part in zip(model.parameters(), row.split([p.numel() for p in model.parameters()])):
        p.grad = part.view_as(p)
    return row


def train(model: nn.Module, num_steps: int, size: int) -> float:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for step in range(num_steps):
        gradient(model, *text(33, seed=step), size)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()


def run_rank
