"""A gradient penalty (a second derivative) inside the loss: the critic of WGAN-GP.

By hand, the noise that mixes a real and a fake sample differs between splits, and a penalty outside of the loss is not
divided with it. Here each sample brings its noise, and the loss returns one value per sample.
"""

import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.data import Batches
from anybatch.testing import relative_error


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """Return a critic, its optimizer, and effective batches of real and fake samples with the share of each."""
    torch.manual_seed(0)
    samples = list(zip(torch.randn(40, 6), torch.randn(40, 6) + 1, torch.rand(40, 1), strict=True))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), ab.batches(samples, effective_batch_size=15)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return one loss per sample (Gulrajani et al. 2017, arXiv 1704.00028)."""
    real, fake, share = batch
    mixed = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    losses: Tensor = (model(fake) - model(real)).squeeze(1) + 10 * (slope.norm(dim=1) - 1).square()
    return losses


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
        loss(model, batch.load()).mean().backward()
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    print(f"error: {relative_error(train().state_dict(), train_whole().state_dict()):.0e}")
