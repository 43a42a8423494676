"""The fields of a job are validated before anything is called."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anybatch as ab
from anybatch.errors import BatchSizeError, DataError, LossError, ParameterError, UserError


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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"model": nn.Linear(2, 1)},
            ParameterError,
            r"Job\(model=\.\.\.\) is an object of type Linear, already made; pass a .* it: model=lambda: \.\.\.",
        ),
        ({"model": {"net": nn.Linear(2, 1)}}, ParameterError, r"an object of type dict, already made; .* model=lambda"),
        (
            {"model": nn.Linear},
            ParameterError,
            r"must be a function model\(\), but Linear\(in_features.* missing a required argument: 'in_features'",
        ),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)},
            ParameterError,
            r"an object of type SGD, already made; pass a function optimizer\(named_parameters, learning_rate\)\.",
        ),
        (
            {"optimizer": lambda named: torch.optim.SGD(named, 0.1)},
            ParameterError,
            r"optimizer\(named_parameters, learning_rate\), but <lambda>\(named\) cannot be called so: too many",
        ),
        ({"dataset": torch.zeros(4, 2)}, DataError, r"Job\(dataset=\.\.\.\) is an object of type Tensor"),
        ({"dataset": lambda split: [split]}, DataError, r"must be a function dataset\(\), but <lambda>\(split\)"),
        ({"loss": "mse"}, LossError, r"Job\(loss='mse'\) must be a declared loss, such as .* an object of type str"),
        ({"loss": ParameterLoss()}, LossError, "an object of type ParameterLoss with parameters, .* into the model"),
        (
            {"loss": ab.mean_over_samples(ParameterLoss())},
            LossError,
            "an object of type ParameterLoss with parameters",
        ),
        ({"collate": lambda: None}, DataError, r"must be a function collate\(samples\)"),
        (
            {"scheduler": lambda optimizer: optimizer},
            ParameterError,
            r"scheduler\(optimizer, num_steps\), but <lambda>",
        ),
        ({"clip": 0.0}, UserError, "clip=0.0"),
        (
            {"evaluate": mean_square},
            UserError,
            r"must be evaluate=ab\.Evaluation\(\.\.\.\), not an object of type func",
        ),
        (
            {"defaults": {"epochs": 1}},
            UserError,
            r"must be defaults=ab\.RunConfig\(\.\.\.\), not an object of type dict",
        ),
        ({"defaults": None}, UserError, r"must be defaults=ab\.RunConfig"),
    ],
)
def test_refused(changes: dict[str, Any], error: type[UserError], message: str) -> None:
    """Objects instead of functions, and functions with other arguments, raise with the right form."""
    with pytest.raises(error, match=message):
        job(**changes)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ab.Evaluation(dataset=torch.zeros(2)), DataError, r"Evaluation\(dataset=\.\.\.\) is an object"),  # type: ignore[arg-type]
        (lambda: ab.Evaluation(dataset=list, metric="accuracy"), LossError, r"pass a function metric\(model, batch\)"),  # type: ignore[arg-type]
        (
            lambda: ab.Evaluation(dataset=list, effective_batch_size=0),
            BatchSizeError,
            "effective_batch_size=0 must be a whole number of at least 1",
        ),
    ],
)
def test_evaluation(make: Callable[[], ab.Evaluation], error: type[UserError], message: str) -> None:
    """An evaluation is validated like a job."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"effective_batch_size": 0}, BatchSizeError, "effective_batch_size=0 must be a whole number of at least 1"),
        ({"effective_batch_size": True}, BatchSizeError, "effective_batch_size=True must be a whole number"),
        ({"base_batch_size": 2.5}, BatchSizeError, "base_batch_size=2.5 must be a whole number"),
        ({"epochs": 0}, UserError, "epochs=0 must be a whole number of at least 1"),
        ({"steps": -1}, UserError, "steps=-1 must be a whole number of at least 1"),
        ({"epochs": 1, "steps": 2}, UserError, "epochs=1 and steps=2 contradict each other. Pass one of them"),
        ({"learning_rate": 0.0}, UserError, "learning_rate=0.0 must be a finite number above 0"),
        ({"learning_rate": math.nan}, UserError, "learning_rate=nan must be a finite number above 0"),
        ({"learning_rate": "1e-3"}, UserError, "learning_rate='1e-3' must be a finite number above 0"),
        ({"learning_rate_rule": "cubic"}, UserError, "learning_rate_rule='cubic' must be one of 'linear', 'sqrt', 'no"),
    ],
)
def test_defaults(changes: dict[str, Any], error: type[UserError], message: str) -> None:
    """Every number is validated, and epochs against steps."""
    with pytest.raises(error, match=message):
        ab.RunConfig(**({"effective_batch_size": 8, "learning_rate": 0.1} | changes))
