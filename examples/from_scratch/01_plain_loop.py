"""The plain loop: one optimizer step on one whole batch. Everything that follows must equal it.

gradient = d/dw (sum of the losses of the batch's N samples / N)

Points lie on two noisy spirals, and a small network says on which. All is float64, so that two
ways to the same gradient differ by rounding alone, which is about 1e-16.
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


def gradient(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the batch, all parameters in one row."""
    model.zero_grad()
    loss = cross_entropy(model(points), labels)
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int) -> None:
    """Take optimizer steps, each on a batch of its own."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(num_steps):
        gradient(model, *spirals(96, seed=step))
        optimizer.step()


def accuracy(model: nn.Module) -> float:
    """Return the share of right answers on points that no step has seen."""
    points, labels = spirals(1000, seed=10_000)
    return float((model(points).argmax(dim=1) == labels).double().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)  # a network this small is slower on several
    for num_steps in (0, 100, 400):
        model = make_model()
        train(model, num_steps)
        print(f"after {num_steps:3} steps  {accuracy(model):.1%} right")
