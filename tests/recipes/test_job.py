"""The fields of a job are validated before anything is called."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anybatch as ab
from anybatch.errors import BatchSizeError, DataError, LossError, ParameterError, UserError
from tests.raising import raises


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared outputs."""
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def job(**changes: Any) -> ab.Job:
    """Return a job that is valid except for the changes."""
    arguments: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "optimizer": torch.optim.AdamW,
        "loss": ab.mean_over_samples(mean_square),
        "dataset": lambda: torch.zeros(4, 2),
        "defaults": ab.RunConfig(effective_batch_size=2, learning_rate=0.1),
    }
    return ab.Job(**(arguments | changes))


class ParameterLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(batch) * self.scale).mean()
        return loss


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": ParameterLoss},
        {"optimizer": lambda named, rate: torch.optim.SGD(named, 2 * rate)},
        {"loss": mean_square},
        {"loss": nn.Identity()},
        {"scheduler": CosineAnnealingLR},
        {"collate": torch.stack, "clip": 1.0},
        {"evaluate": ab.Evaluation(dataset=lambda: torch.zeros(1, 2))},
        {"evaluate": ab.Evaluation(dataset=list, metric=mean_square, effective_batch_size=7)},
        {"evaluate": ab.Evaluation(dataset=list, metric=ab.mean_over_samples(mean_square))},
        {"dataset": dict},
    ],
)
def test_valid(changes: dict[str, Any]) -> None:
    """Functions, lambdas, classes, built-ins and torch's own optimizers and schedulers are accepted."""
    assert job(**changes).defaults.effective_batch_size == 2


class EmptyLoss(ParameterLoss):
    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("changes", "error", "code"),
    [
        ({"model": nn.Linear(2, 1)}, ParameterError, "already_made"),
        ({"model": {"net": nn.Linear(2, 1)}}, ParameterError, "already_made"),
        ({"model": nn.Linear}, ParameterError, "wrong_arguments"),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)}, ParameterError, "already_made"),
        ({"optimizer": lambda named: torch.optim.SGD(named, 0.1)}, ParameterError, "wrong_arguments"),
        ({"dataset": torch.zeros(4, 2)}, DataError, "already_made"),
        ({"dataset": lambda split: [split]}, DataError, "wrong_arguments"),
        ({"loss": "mse"}, LossError, "not_a_loss"),
        ({"loss": ab.mean_over_samples(ParameterLoss())}, LossError, "loss_has_parameters"),
        ({"loss": ab.mean_over_samples(EmptyLoss())}, LossError, "loss_has_parameters"),
        ({"collate": lambda: None}, DataError, "wrong_arguments"),
        ({"scheduler": lambda optimizer: optimizer}, ParameterError, "wrong_arguments"),
        ({"evaluate": mean_square}, UserError, "wrong_type"),
        ({"defaults": {"epochs": 1}}, UserError, "wrong_type"),
        ({"defaults": ab.RunConfig(effective_batch_size=2)}, UserError, "missing_default"),
        (lambda: ab.Evaluation(dataset=torch.zeros(2)), DataError, "already_made"),  # type: ignore[arg-type]
        (lambda: ab.Evaluation(dataset=list, metric="accuracy"), LossError, "already_made"),  # type: ignore[arg-type]
        (lambda: ab.Evaluation(dataset=list, effective_batch_size=0), BatchSizeError, "not_a_whole_number"),
    ],
)
def test_refused(changes: Any, error: type[UserError], code: str) -> None:
    """Objects instead of functions, and functions with other arguments, are refused, in an evaluation too."""
    with raises(error, code):
        changes() if callable(changes) else job(**changes)
