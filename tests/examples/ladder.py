"""The programs of the ladder as modules, with shared models, losses and comparisons."""

import importlib.util
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.architecture.source_tree import ROOT
from tests.engine.cases import Batch

LADDER = ROOT / "examples" / "from_scratch"
PROGRAMS = sorted(LADDER.glob("0*.py"))
EXACT = 1e-12


def program(number: int) -> ModuleType:
    """Return a program of the ladder."""
    (path,) = LADDER.glob(f"{number:02}_*.py")
    return module_at(path)


def module_at(path: Path) -> ModuleType:
    """Import a file as a module by path, since a program's name starts with a digit."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return float((found - expected).norm() / expected.norm())


def parameters_of(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def adder(seed: int = 0) -> nn.Module:
    """Return the linear layer that the programs on ranks train."""
    torch.manual_seed(seed)
    return nn.Linear(8, 1).double()


def rows_of_numbers(num_rows: int, seed: int = 0) -> Tensor:
    """Return rows of eight numbers to add."""
    return torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed)).double()


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over points."""
    loss: Tensor = cross_entropy(model(batch["points"]), batch["labels"])
    return loss


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over targets."""
    loss: Tensor = cross_entropy(model(batch["tokens"]).mT, batch["labels"])
    return loss


def add_up(model: nn.Module, batch: Batch) -> Tensor:
    """Return one loss per row of numbers."""
    numbers = batch["numbers"]
    losses: Tensor = (model(numbers)[:, 0] - numbers.sum(dim=1)).square()
    return losses
