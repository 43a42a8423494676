"""An exponential moving average of the weights, updated once per optimizer step.

By hand, an average that is updated after each micro-batch decays as many times faster as there are micro-batches.
`average_decay` averages after each step, checkpoints contain the average, and `evaluate(averaged=True)` uses it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import swa_utils

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a classifier, its optimizer, and the effective batches of 2 epochs."""
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    samples = list(zip(x, x.sum(1).gt(0).long(), strict=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.5), ab.batches(samples, effective_batch_size=15, epochs=2)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples; return the model with the averaged weights."""
    model, optimizer, batches = setup()
    with ab.Engine(model, optimizer, ab.mean_over_samples(loss), average_decay=0.9, micro_batch_size=4) as engine:
        for batch in batches:
            engine.step(batch)
        if engine.average:
            model.load_state_dict(engine.average.weights)
    return model


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    model, optimizer, batches = setup()
    average = swa_utils.AveragedModel(setup()[0], multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average.update_parameters(model)  # the first update copies
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch.load()).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.module


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
