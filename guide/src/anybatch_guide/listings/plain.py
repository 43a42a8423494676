"""Accumulation in plain PyTorch: 64 samples in four micro-batches of 16, one update."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def spirals(seed: int) -> tuple[Tensor, Tensor]:
    """Return 64 points, and the spiral arm of each: 0 or 1."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(64, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def train() -> None:
    """Make three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        points, arms = spirals(seed=step)
        optimizer.zero_grad()
        total = 0.0
        for rows in torch.arange(64).split(16):
            logits = model(points[rows])
            loss_sum = cross_entropy(logits, arms[rows], reduction="sum")
            loss = loss_sum / 64  # the whole batch, not this micro-batch
            loss.backward()  # adds to p.grad
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # once
        optimizer.step()
        print(f"step {step}  loss {total:.12f}  norm {norm:.12f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
