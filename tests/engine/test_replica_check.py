"""The replica check compares all weights with little extra memory."""

from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine import rank_comparison
from anybatch.engine.rank_comparison import ReplicaCheck
from anybatch.errors import DoesNotFitError, ReplicaError
from tests.engine.cases import InMemory, classify, perceptron, vectors
from tests.ranks_fixture import Ranks


class WithTeacher(nn.Module):
    """A model whose forward also changes a frozen copy of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = perceptron(), perceptron()
        self.teacher.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return class scores."""
        with torch.no_grad():
            for parameter in self.teacher.parameters():
                parameter.add_(x.mean())
        scores: torch.Tensor = self.student(x)
        return scores


def names_that_differ(strategy: str) -> tuple[str, ...]:
    """Run on every rank: train with a teacher that depends on the rank's samples; return the names that differ."""
    model, world = WithTeacher(), ab.World.from_environment()
    with ab.Engine(
        model,
        torch.optim.SGD(model.student.parameters(), lr=0.1),
        ab.mean_over_samples(classify),
        micro_batch_size=2,
        strategy=strategy,
        check_loss=False,
        world=world,
    ) as engine:
        engine.step(InMemory(vectors(7)))
        with pytest.raises(ReplicaError) as caught:
            engine.evaluate([InMemory(vectors(7))])
    return caught.value.names


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp", "zero1"])
def test_frozen_weights_that_drift_apart_are_found(strategy: str, two_ranks: Ranks) -> None:
    """Frozen weights are compared like trained ones, and reported by name."""
    expected = tuple(f"teacher.{name}" for name, _ in perceptron().named_parameters())
    assert two_ranks.run(names_that_differ, strategy) == [expected] * 2


def test_out_of_memory_while_weights_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory in the comparison raises an error of anybatch with the location."""

    def fails(_: Any) -> torch.Tensor:
        message = "CUDA out of memory"
        raise torch.OutOfMemoryError(message)

    check = ReplicaCheck(ab.World(), dict(perceptron().named_parameters()), enabled=True)
    monkeypatch.setattr(check, "_enabled", True)
    monkeypatch.setattr(rank_comparison, "checksums", fails)
    for compare, step in ((lambda: check.digest(100), 100), (lambda: check.compare(7), 7)):
        with pytest.raises(DoesNotFitError) as caught:
            compare()
        assert caught.value.step == step
        assert f"before step {step} (counted from 0), while comparing the weights" in str(caught.value)
