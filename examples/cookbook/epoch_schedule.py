"""A schedule by epochs, stepped by your loop after the last batch of each epoch.

By hand, a scheduler that is stepped after each backward falls as many times faster as there are micro-batches. A
scheduler that you step yourself is unknown to the engine: `save_also` puts its state into checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier, its optimizer, and the effective batches of 3 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=15, epochs=3)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        engine.save_also(scheduler=scheduler)
        for batch in batches:
            engine.step(batch)
            if batch.ends_epoch:
                scheduler.step()
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
        if batch.ends_epoch:
            scheduler.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
