"""LoRA: the base is frozen, and two small matrices train.

By hand, adapters on several ranks often start from different random weights. The engine compares the replicas when it
starts, reduces only the gradients of the adapters, and `save(only_trainable=True)` leaves the base out.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.ModuleDict, torch.optim.Optimizer, Batches]:
    """Return a frozen layer with an adapter, its optimizer, and the effective batches of 2 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    adapter = {"down": nn.Linear(6, 2, bias=False), "up": nn.Linear(2, 2, bias=False)}
    model = nn.ModuleDict({"base": nn.Linear(6, 2).requires_grad_(requires_grad=False), **adapter})
    nn.init.zeros_(adapter["up"].weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=15, epochs=2)


def loss(model: nn.ModuleDict, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples of a layer with low-rank adaptation (Hu et al. 2021, arXiv 2106.09685)."""
    return F.cross_entropy(model["base"](batch[0]) + model["up"](model["down"](batch[0])), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
