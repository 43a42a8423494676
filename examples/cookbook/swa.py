"""Stochastic weight averaging with torch's own tools.

By hand, averages and schedules are easily counted in micro-batches. One `engine.step` is one optimizer step on your
own module, so torch's tools work unchanged; `engine.save_also` puts their states into checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier, its optimizer, and the effective batches of 4 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=15, epochs=4)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples; return the mean of the weights of the last 3 epochs."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        average, rate = torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1)
        engine.save_also(rate=rate, average=average)
        for batch in batches:
            engine.step(batch)
            if batch.ends_epoch and batch.epoch > 0:
                average.update_parameters(model)
                rate.step()
    return average.module


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    average, rate = torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
        if batch.ends_epoch and batch.epoch > 0:
            average.update_parameters(model)
            rate.step()
    return average.module


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
