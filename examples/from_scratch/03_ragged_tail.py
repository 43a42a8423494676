"""The ragged tail: 33 samples are micro-batches of 16, 16 and 1; their mean counts the 1 16-fold.

right: gradient = sum over the micro-batches of d/dw (sum of their losses / 33 samples)
wrong: gradient = sum over the micro-batches of d/dw (mean of their losses / 3 micro-batches)
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def spirals(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points on two noisy spirals, and for each point on which one it lies."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (num_samples,), generator=random)
    radii = torch.rand(num_samples, generator=random, dtype=torch.float64)
    angles = torch.pi * (2 * radii + labels) + 0.2 * torch.randn(num_samples, generator=random)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1), labels


def make_model() -> nn.Module:
    """Return a network with one hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def gradient(model: nn.Module, points: Tensor, labels: Tensor, size: int, *, exact: bool) -> Tensor:
    """Return the gradient of the batch, or else a mean of means, from micro-batches of `size`."""
    model.zero_grad()
    micro_batches = torch.arange(len(labels)).split(size)
    for rows in micro_batches:
        losses = cross_entropy(model(points[rows]), labels[rows], reduction="none")
        loss = losses.sum() / len(labels) if exact else losses.mean() / len(micro_batches)
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int, *, exact: bool) -> None:
    """Take optimizer steps, each on a batch of its own."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(num_steps):
        gradient(model, *spirals(33, seed=step), 16, exact=exact)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    whole = gradient(make_model(), *spirals(33, seed=0), 33, exact=True)
    points, labels = spirals(1000, seed=10_000)
    for exact in (True, False):
        found = gradient(make_model(), *spirals(33, seed=0), 16, exact=exact)
        error = (found - whole).norm() / whole.norm()
        model = make_model()
        train(model, 400, exact=exact)
        right = (model(points).argmax(dim=1) == labels).double().mean()
        name = "sum over count" if exact else "mean of means"
        print(f"{name:14}  gradient error {error:.1e}  after 400 steps {right:.1%} right")
