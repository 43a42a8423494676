"""Accumulation: micro-batches that fit in memory, one optimizer step; `backward` adds to `p.grad`.

gradient of the batch = sum over its K equal micro-batches of d/dw (mean of its losses / K)
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


def gradient(model: nn.Module, points: Tensor, labels: Tensor, micro_batch_size: int) -> Tensor:
    """Return the gradient of the batch as one vector."""
    model.zero_grad()
    micro_batches = torch.arange(len(labels)).split(micro_batch_size)
    for rows in micro_batches:
        loss = cross_entropy(model(points[rows]), labels[rows])
        (loss / len(micro_batches)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def kept_bytes(model: nn.Module, points: Tensor, labels: Tensor) -> int:
    """Return the bytes that a forward saves for its backward, including weights."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        cross_entropy(model(points), labels)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())


def train(model: nn.Module, num_steps: int, micro_batch_size: int) -> Tensor:
    """Take optimizer steps, each on a new batch; return all parameters as one vector."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for step in range(num_steps):
        gradient(model, *spirals(96, seed=step), micro_batch_size)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for size in (96, 16):
        print(f"{size} at a time: {kept_bytes(make_model(), *spirals(size, seed=0)):6,} bytes kept")
    whole, summed = (gradient(make_model(), *spirals(96, seed=0), size) for size in (96, 16))
    print(f"gradients differ by {(summed - whole).norm() / whole.norm():.1e}")
    whole, summed = (train(make_model(), 200, size) for size in (96, 16))
    print(f"parameters after 200 steps differ by {(summed - whole).norm() / whole.norm():.1e}")
