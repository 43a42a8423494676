"""The ragged tail: 33 samples in micro-batches of 16, 16 and 1. A mean of means counts the 1 as 16.

gradient = sum over the micro-batches of d/dw (sum of their losses / samples of the whole batch)
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


def gradient(model: nn.Module, points: Tensor, labels: Tensor, size: int, *, exact: bool) -> Tensor:
    """Return the gradient of the batch (exact), or a mean of the micro-batches' means."""
    model.zero_grad()
    micro_batches = torch.arange(len(labels)).split(size)
    for rows in micro_batches:
        loss_sum = cross_entropy(model(points[rows]), labels[rows], reduction="sum")
        divisor = len(labels) if exact else len(rows) * len(micro_batches)
        (loss_sum / divisor).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(model: nn.Module, num_steps: int, *, exact: bool) -> None:
    """Take optimizer steps, each on a new batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        gradient(model, *spirals(33, seed=step), 16, exact=exact)
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    batch, (points, labels) = spirals(33, seed=0), spirals(1000, seed=10_000)
    print("samples per micro-batch:", *(len(rows) for rows in batch[1].split(16)))
    whole = gradient(make_model(), *batch, 33, exact=True)
    for name, exact in ("sum over count", True), ("mean of means", False):
        error = (gradient(make_model(), *batch, 16, exact=exact) - whole).norm() / whole.norm()
        model = make_model()
        train(model, 200, exact=exact)
        right = (model(points).argmax(dim=1) == labels).double().mean()
        print(f"{name:14}  gradient error {error:.1e}  after 200 steps {right:.1%} right")
