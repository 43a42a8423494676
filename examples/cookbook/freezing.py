"""Freezing: train the head first, then unfreeze the trunk and train both.

An engine refuses parameters that begin to train in the middle of a run, since ranks would no longer reduce the same
gradients. Give the new parameters to the optimizer, and continue with a second engine at the first one's position.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Sequential, torch.optim.Optimizer, Batches]:
    """Return a classifier with a frozen trunk, the optimizer of its head, and the effective batches of 2 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.5, momentum=0.9)
    return model, optimizer, ab.batches(samples, effective_batch_size=15, epochs=2)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train the head in one epoch and the model in another, in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4)
    for batch in batches:
        engine.step(batch)
        if batch.ends_epoch and batch.epoch == 0:
            engine.close()
            optimizer.add_param_group({"params": list(model[0].requires_grad_().parameters()), "lr": 0.05})
            engine = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4)
    engine.close()
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
        if batch.ends_epoch and batch.epoch == 0:
            optimizer.add_param_group({"params": list(model[0].requires_grad_().parameters()), "lr": 0.05})
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
