"""A learning-rate finder: raise the rate in every step, and take it where the loss fell fastest.

By hand, ranks choose rates by their own noisy losses; a report has the loss of the effective batch on every rank.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier, its optimizer, and the effective batches of 8 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), ab.batches(samples, effective_batch_size=15, epochs=8)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Find the rate, then train with it from the first weights, in micro-batches of at most 4 samples."""
    model, rates = nn.Module(), [0.1 * 1.13**step for step in range(24)]
    for _ in ("find", "train"):
        (model, optimizer, batches), losses = setup(), list[float]()
        with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
            for batch, rate in zip(batches, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate
                losses.append(engine.step(batch).loss)
        rates = [rates[int(torch.tensor(losses).diff().argmin())]] * len(rates)
    return model


def train_whole() -> nn.Module:
    """Do the same on whole batches in plain PyTorch."""
    model, rates = nn.Module(), [0.1 * 1.13**step for step in range(24)]
    for _ in ("find", "train"):
        (model, optimizer, batches), losses = setup(), list[Tensor]()
        for batch, rate in zip(batches, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            losses.append(loss(model, batch.load()))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        rates = [rates[int(torch.stack(losses).diff().argmin())]] * len(rates)
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
