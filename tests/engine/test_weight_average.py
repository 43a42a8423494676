"""The moving average of weights has full precision."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.testing import relative_error
from tests.engine.cases import InMemory
from tests.ranks_fixture import Ranks

NUM_STEPS, DECAY, RATE = 24, 0.9, 2.0**-11


class Line(nn.Module):
    """A bf16 weight whose gradient is the mean of the samples, independent of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1.0, 2.0, 8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number per sample."""
        return (x * self.weight).sum(1)


def samples() -> torch.Tensor:
    """Return eight samples that are exact in bf16, also their sums and means."""
    return torch.tensor([1.0, 2.0, 0.5, 1.5, 0.75, 0.25, 1.0, 1.0])[:, None].expand(8, 8).bfloat16()


def plain() -> dict[str, Any]:
    """Return the average of float32 weights, updated step by step."""
    weight = torch.linspace(1.0, 2.0, 8, dtype=torch.bfloat16).float()
    average = weight.clone()
    for _ in range(NUM_STEPS):
        weight -= RATE * samples().float().mean(0)
        average.lerp_(weight, 1 - DECAY)
    return {"weight": average}


def movement_missed(strategy: str, way: Any) -> float:
    """Run on every rank: return the relative error of the average's movement."""
    model = Line()
    with ab.Engine(
        model,
        lambda named: torch.optim.SGD(named, lr=RATE),
        ab.mean_over_samples(lambda net, batch: net(batch["x"]).float().mean()),
        micro_batch_size=2,
        strategy=strategy,
        bf16_weights=way,
        average_decay=DECAY,
        check_loss=False,
        world=ab.World() if strategy in {"single", "data_parallel"} else ab.World.from_environment(),
    ) as engine:
        for _ in range(NUM_STEPS):
            engine.step(InMemory({"x": samples()}))
        assert engine.average is not None
        start = Line().weight.detach().float()
        moved = {"weight": engine.average.weights["weight"] - start}
        return relative_error(moved, {"weight": plain()["weight"] - start})


@pytest.mark.parametrize(
    ("strategy", "way"),
    [(strategy, way) for strategy in ("single", "all_reduce") for way in ("copied", "split")]
    + [("zero1", "copied"), ("data_parallel", "copied")],
)
def test_average_follows_float32_weights(strategy: str, way: str, two_ranks: Ranks) -> None:
    """The average of bf16 weights follows their float32 form, including updates too small for bf16."""
    found = [movement_missed(strategy, way)] if strategy == "single" else two_ranks.run(movement_missed, strategy, way)
    assert max(found) <= 1e-6
