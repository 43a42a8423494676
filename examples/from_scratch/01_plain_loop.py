"""The plain loop: one optimizer step per batch. The programs that follow must equal it.

gradient = d/dw (sum of the losses of the batch's N samples / N)

A small network classifies points of two spiral arms. Everything is float64, so two ways to
compute the same gradient differ only by rounding, about 1e-16.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def spirals(num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points of the plane, and the spiral arm (0 or 1) of each."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(num_samples, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def make_model() -> nn.Module:
    """Return a network with one hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def gradient(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the batch as one vector."""
    model.zero_grad()
    loss = cross_entropy(model(points), labels)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int) -> None:
    """Take optimizer steps, each on a new batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        gradient(model, *spirals(96, seed=step))
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Return the fraction of correct answers on new points."""
    points, labels = spirals(1000, seed=10_000)
    return float((model(points).argmax(dim=1) == labels).double().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads slow down a network this small
    for num_steps in (0, 50, 200):
        model = make_model()
        train(model, num_steps)
        print(f"after {num_steps:3} steps  {accuracy(model):.1%} right")
