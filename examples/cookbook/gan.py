"""A GAN: two models, two optimizers and two engines, which take turns on the same effective batch.

By hand, the generator's backward also adds gradients to the discriminator, which then count in its next micro-batch.
An engine sums the gradients of its own parameters only; the noise is data, so the split does not change it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, list[Any], Batches]:
    """Return the generator; model, optimizer and loss of each turn; and effective batches of noise and samples."""
    torch.manual_seed(0)
    d, g = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(4, 6)
    samples = list(zip(torch.randn(40, 4), torch.randn(40, 6) + 1, strict=True))

    def d_loss(_: nn.Module, batch: list[Tensor]) -> Tensor:
        return (F.softplus(d(g(batch[0]).detach())) + F.softplus(-d(batch[1]))).squeeze(1)

    def g_loss(_: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.softplus(-d(g(batch[0]))).squeeze(1)

    d_turn = (d, torch.optim.SGD(d.parameters(), lr=0.5), d_loss)
    g_turn = (g, torch.optim.SGD(g.parameters(), lr=0.5), g_loss)
    return g, [d_turn, g_turn], ab.batches(samples, effective_batch_size=15)


def train() -> nn.Module:
    """Train in micro-batches of at most 4 samples; return the generator."""
    generator, turns, batches = setup()
    engines = [ab.Engine(*turn, micro_batch_size=4) for turn in turns]  # the losses return one value per sample
    for batch in batches:
        for engine in engines:
            engine.step(batch)
    for engine in engines:
        engine.close()
    return generator


def train_whole() -> nn.Module:
    """Train on whole batches in plain PyTorch."""
    generator, turns, batches = setup()
    for batch in batches:
        for model, optimizer, loss in turns:
            optimizer.zero_grad()
            loss(model, batch.load()).mean().backward()
            optimizer.step()
    return generator


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
