"""A schedule by plateaus: the rate falls when the loss stops falling, on all ranks in the same epoch.

By hand, ranks with different losses lower their rates in different epochs, and their weights drift apart. The loss of
a report is the loss of the effective batch on every rank; `save_also` puts the scheduler's state into checkpoints.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier, its optimizer, and the effective batches of 6 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=8.0), ab.batches(samples, effective_batch_size=15, epochs=6)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        engine.save_also(plateau=plateau)
        for batch in batches:
            report = engine.step(batch)
            if batch.ends_epoch:
                plateau.step(report.loss)  # or engine.evaluate(held_out)["loss"]
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for batch in batches:
        optimizer.zero_grad()
        error = loss(model, batch.load())
        error.backward()
        optimizer.step()
        if batch.ends_epoch:
            plateau.step(error.item())
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
