"""Focal loss: a sum over all anchors, divided by the objects of the effective batch.

By hand, a micro-batch without objects divides by 0 (or by 1, and counts too much), although its background still
teaches the model. An `ab.LossSum` with the count 0 adds its sum; the engine divides by the count of the batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier of anchors, its optimizer, and two effective batches of 21 images, many without objects."""
    torch.manual_seed(0)
    anchors, objects = torch.randn(42, 9, 5), (torch.rand(42, 9) < 0.05).to(torch.get_default_dtype())
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    samples = list(zip(anchors, objects, strict=True))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=21)


def loss(model: nn.Module, batch: list[Tensor]) -> ab.LossSum:
    """Return the sum over anchors and the number of objects (Lin et al. 2017, arXiv 1708.02002)."""
    logits, objects = model(batch[0]).squeeze(-1), batch[1]
    entropy = F.binary_cross_entropy_with_logits(logits, objects, reduction="none")
    wrong = torch.where(objects == 1, 1 - logits.sigmoid(), logits.sigmoid())
    alpha = torch.where(objects == 1, 0.25, 0.75)
    return ab.LossSum((alpha * wrong**2 * entropy).sum(), objects.sum())


def train() -> nn.Module:
    """Train in micro-batches of at most 4 images."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, loss, micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        whole = loss(model, batch.load())
        (whole.total / whole.count).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
