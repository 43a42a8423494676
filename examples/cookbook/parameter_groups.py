"""Parameter groups with their own decay and rate, and one clipping over all of them.

By hand, clipping after each micro-batch (or per group) changes the direction of the gradient. The engine keeps the
groups of the optimizer, and clips the gradient of the effective batch once, by its norm over all groups.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Sequential, torch.optim.Optimizer, Batches]:
    """Return a classifier, an optimizer with three groups, and the effective batches of 2 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    groups = [
        {"params": [model[0].weight], "lr": 0.01, "weight_decay": 0.1},
        {"params": [model[2].weight], "lr": 0.1, "weight_decay": 0.1},
        {"params": [model[0].bias, model[2].bias], "lr": 0.1, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups), ab.batches(samples, effective_batch_size=15, epochs=2)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), clip=0.1, micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
