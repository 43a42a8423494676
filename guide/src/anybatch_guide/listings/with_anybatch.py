"""Accumulation with anybatch: the same three steps, on any number of ranks."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anybatch as ab


def spirals(seed: int) -> list[dict[str, Tensor]]:
    """Return 64 points, and the spiral arm of each: 0 or 1."""
    random = torch.Generator().manual_seed(seed)
    points = torch.randn(64, 2, generator=random, dtype=torch.float64)
    turns = torch.atan2(points[:, 1], points[:, 0]) + points.norm(dim=1)
    arms = (turns.sin() > 0).long()
    return [{"point": points[i], "arm": arms[i]} for i in range(64)]


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the given points; the engine does the rest."""
    logits = model(batch["point"])
    return cross_entropy(logits, batch["arm"])


def train() -> None:
    """Make three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    declared = ab.mean_over_samples(mean_loss)
    engine = ab.Engine(model, optimizer, declared, micro_batch_size=16, clip=0.5)
    dataset = spirals(seed=0) + spirals(seed=1) + spirals(seed=2)
    for batch in ab.batches(dataset, effective_batch_size=64, shuffle=False):
        report = engine.step(batch)
        if engine.world.rank == 0:
            loss, norm = report.loss, report.grad_norm
            print(f"step {report.step}  loss {loss:.12f}  norm {norm:.12f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
