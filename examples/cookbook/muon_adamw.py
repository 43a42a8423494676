"""Muon for the matrices and AdamW for all other parameters, as one optimizer with one schedule.

By hand, two optimizers need two schedulers and two states in a checkpoint, and Muon must see the gradient of the
effective batch: it orthogonalizes, so the mean of the updates of micro-batches is another update.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.optimizers import CombinedOptimizer
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, list[torch.optim.Optimizer], Batches]:
    """Return a classifier, its two optimizers, and the effective batches of 2 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    return model, optimizers, ab.batches(samples, effective_batch_size=15, epochs=2)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizers, batches = setup()
    optimizer = CombinedOptimizer(*optimizers)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), scheduler=schedule, micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizers, batches = setup()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
    for batch in batches:
        model.zero_grad()
        loss(model, batch.load()).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
