"""GRPO: advantages by group; a mean over each completion's tokens, then over completions.

The statistics of a group (or batch) are computed once, with the rewards, before the first backward. By hand, a
micro-batch that cuts a group computes other advantages; here the steps may even shuffle completions over groups.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a policy, its optimizer, and two effective batches of 20 completions, from groups of 4."""
    torch.manual_seed(0)
    tokens, old = torch.randint(0, 9, (40, 8)), -2 - torch.rand(40, 7)
    mask = torch.arange(7) < torch.randint(1, 8, (40, 1))
    reward = torch.randn(10, 4)
    advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
    samples = list(zip(tokens, mask, advantage.flatten(), old, strict=True))
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=20)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return one loss per completion (Shao et al. 2024, arXiv 2402.03300): the mean over its own tokens."""
    tokens, mask, advantage, old = batch
    log_p = -F.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none")
    ratio, advantage = (log_p - old).exp(), advantage.unsqueeze(1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -(gain * mask).sum(1) / mask.sum(1)


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
