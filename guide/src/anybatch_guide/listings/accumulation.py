"""Gradient accumulation as it is usually written: an update after every fourth micro-batch."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from anybatch_guide.listings.plain import spirals


def train(model: nn.Module, optimizer: Optimizer, loader: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Update the weights after every fourth micro-batch."""
    accumulation_steps = 4

    optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(loader):
        outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
        loss = loss / accumulation_steps
        loss.backward()  # adds to p.grad

        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Make two updates, of four micro-batches of 16 samples each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    points, arms = torch.cat([spirals(0)[0], spirals(1)[0]]), torch.cat([spirals(0)[1], spirals(1)[1]])
    train(model, torch.optim.SGD(model.parameters(), lr=1.0), list(zip(points.split(16), arms.split(16), strict=True)))
    print(f"loss {cross_entropy(model(points), arms).item():.12f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
