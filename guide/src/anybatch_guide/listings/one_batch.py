"""One batch, four ways: the same training with different splits. Losses differ only by rounding.

python -m anybatch_guide.listings.one_batch 64                         64 x 1: one micro-batch
python -m anybatch_guide.listings.one_batch 16                         16 x 4: four micro-batches of 16
python -m anybatch_guide.listings.one_batch 4                          4 x 16
torchrun --nproc-per-node 2 -m anybatch_guide.listings.one_batch 8     2 ranks x 8 x 4
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab


def spirals() -> tuple[Tensor, Tensor]:
    """Return 64 points of the plane, and the spiral arm of each: 0 or 1."""
    random = torch.Generator().manual_seed(0)
    points = torch.randn(64, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    return points, (turns.sin() > 0).long()


def make_model(dtype: torch.dtype) -> nn.Module:
    """Return a network with one hidden layer, always with the same initial weights."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(dtype)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the points."""
    return cross_entropy(model(batch["point"]), batch["arm"])


def train(micro_batch_size: int, dtype: torch.dtype, clip: float | None = None) -> list[float]:
    """Return the loss of each of 60 steps; every step sees all 64 points."""
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = ab.Engine(model, optimizer, ab.mean_over_samples(loss), micro_batch_size=micro_batch_size, clip=clip)
    points, arms = spirals()
    dataset = [{"point": points[i].to(dtype), "arm": arms[i]} for i in range(64)]
    batches = ab.batches(dataset, effective_batch_size=64, epochs=60, shuffle=False)
    return [float(engine.step(batch).loss) for batch in batches]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.float64):
        losses = train(int(sys.argv[1]), dtype, *map(float, sys.argv[2:]))  # a second number clips
        if ab.World.from_environment().rank == 0:
            print(dtype, *(f"{loss:.17g}" for loss in losses))
