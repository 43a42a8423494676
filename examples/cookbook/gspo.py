"""GSPO: ratios of whole sequences, with advantages normalized over the effective batch.

The mean and deviation of the rewards are statistics of the effective batch, fixed before the first backward. By hand,
they are usually computed in each micro-batch, and the advantages of a completion depend on its neighbours.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a policy, its optimizer, and an effective batch of 40 completions that is used twice."""
    torch.manual_seed(0)
    tokens, old = torch.randint(0, 9, (40, 8)), -2 - torch.rand(40, 7)
    mask = torch.arange(7) < torch.randint(1, 8, (40, 1))
    reward = torch.randn(40)
    advantage = (reward - reward.mean()) / reward.std()
    samples = list(zip(tokens, mask, advantage, old, strict=True))
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=40, epochs=2)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return one loss per completion (Zheng et al. 2025, arXiv 2507.18071): the ratio is a geometric mean of tokens."""
    tokens, mask, advantage, old = batch
    log_p = -F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    ratio = (((log_p - old) * mask).sum(1) / mask.sum(1)).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.3) * advantage)


def train() -> nn.Module:
    """Train in micro-batches of at most 3 completions."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=3) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).mean().backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
