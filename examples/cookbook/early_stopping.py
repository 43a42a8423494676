"""Early stopping by the held-out loss, on all ranks in the same epoch.

By hand, each rank evaluates its share and may stop alone, so that the others wait forever; and a mean of batch means
is not the mean of the set. `engine.evaluate` returns the same numbers on every rank, for any micro-batch size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches, Batches]:
    """Return a classifier, its optimizer, and effective batches to train on and to evaluate."""
    torch.manual_seed(0)
    x = torch.randn(70, 6)
    samples = list(zip(x, (x.sum(1) + torch.randn(70) > 0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    batches, held_out = ab.batches(samples[:37], effective_batch_size=15, epochs=30), samples[37:]
    return model, torch.optim.SGD(model.parameters(), lr=1.0), batches, ab.batches(held_out, effective_batch_size=33)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples until the held-out loss is higher than the epoch before."""
    model, optimizer, batches, held_out = setup()
    best = float("inf")
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
            if batch.ends_epoch and best < (best := engine.evaluate(held_out)["loss"]):
                break  # engine.save("best", keep_last=1) after each better epoch would keep the best weights
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches, held_out = setup()
    (whole,), best = held_out, float("inf")
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
        if batch.ends_epoch and best < (best := loss(model, whole.load()).item()):
            break
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
