"""Errors have fields for programs, which survive pickling and re-raising."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch import errors
from anybatch.engine.parts import failures_reported
from anybatch.errors import (
    AnyBatchError,
    BatchSizeError,
    CannotRedoError,
    DiskFullError,
    DoesNotFitError,
    HalfUpdatedError,
    LossError,
    NonFiniteError,
    RankFailedError,
    RanksDifferError,
    ReplicaError,
    TruncatedCheckpointError,
    UpdateFailedError,
    warn_user,
)
from tests.raising import warns

_PLACE: dict[str, Any] = {"rank": 1, "step": 7, "phase": "clip", "micro_batch_size": 4}
FIELDS: list[tuple[type[AnyBatchError], dict[str, Any]]] = [
    (BatchSizeError, {"effective_batch_size": 8, "micro_batch_size": 3, "accumulation_steps": 2, "world_size": 2}),
    (LossError, {"term": "language", "unit": "tokens"}),
    (NonFiniteError, {"step": 3, "updated": True}),
    (DoesNotFitError, _PLACE),
    (CannotRedoError, _PLACE),
    (HalfUpdatedError, _PLACE),
    (TruncatedCheckpointError, {"path": Path("runs/step-00000001")}),
    (DiskFullError, {"path": Path("runs"), "needed_bytes": 10, "free_bytes": 9}),
    (ReplicaError, {"ranks": (1, 2), "names": ("weight",)}),
    (RanksDifferError, {"step": 3, "names": ("batch",), "meant": ("one", "other")}),
    (UpdateFailedError, {"step": 3}),
    (RankFailedError, {"rank": 1, "step": None, "error_type": "ValueError", "reason": "no"}),
]
ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AnyBatchError)]


def sgd(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(named_parameters, lr=0.1)


@ab.mean_over_samples
def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean square of the outputs."""
    outputs: torch.Tensor = model(batch)
    return outputs.square().mean()


@pytest.mark.parametrize(("kind", "fields"), FIELDS)
def test_fields_survive_pickling(kind: type[AnyBatchError], fields: dict[str, Any]) -> None:
    """Pickled, copied, or raised from another error, an error keeps its text and all fields."""
    error = kind("m", **fields)
    with pytest.raises(kind) as caught:
        raise error from ZeroDivisionError("0")

    pickled = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    for found in (pickled, copy.copy(error), caught.value):
        assert type(found) is kind
        assert str(found) == "m"
        assert {name: getattr(found, name) for name in fields} == fields
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", ALL)
def test_fields_are_optional(kind: type[AnyBatchError]) -> None:
    """Every error can be made from a message alone; fields are documented keywords with defaults."""
    error = kind("only words")
    assert str(error) == "only words"
    with pytest.raises(TypeError):
        kind("only words", unheard_of=1)
    documented = "".join(base.__doc__ or "" for base in kind.__mro__)
    for name, value in vars(error).items():
        assert value in (None, (), "")
        assert f"    {name}: " in documented


def test_errors_and_warnings_have_codes() -> None:
    """A code is a field of every error and warning, empty where the class says it all, and survives pickling."""
    for kind in ALL:
        assert kind("text").code == ""
        error = pickle.loads(pickle.dumps(kind("text", code="why")))  # noqa: S301 (made here)
        assert (str(error), error.code) == ("text", "why")
    with warns("why"):
        warn_user("text", "why")


def step(loss: Any, batch: torch.Tensor, **options: Any) -> None:
    """Run a step on a batch of ones, and one on this batch."""
    with ab.Engine(nn.Linear(1, 1), sgd, loss, **options) as engine:
        engine.step(torch.ones(2, 1))
        engine.step(batch)


ROWS = torch.arange(6.0).reshape(6, 1)
SIZES = {"effective_batch_size": 8, "micro_batch_size": 3, "accumulation_steps": 5}
RAISED: dict[str, tuple[Callable[[], object], type[AnyBatchError], dict[str, Any]]] = {
    "contradicting sizes": (lambda: step(squares, ROWS, **SIZES), BatchSizeError, {**SIZES, "world_size": 1}),
    "a loss that is not finite": (
        lambda: step(squares, ROWS * torch.nan, check_loss=False),
        NonFiniteError,
        {"step": 1, "updated": False},
    ),
    "several values for a sample": (
        lambda: step(
            ab.sum_of(lambda model, batch: {"main": model(batch).expand(-1, 3)}, main=ab.samples()),
            ROWS,
            check_loss=False,
        ),
        LossError,
        {"term": "main", "unit": "samples"},
    ),
    "a sum declared as a mean": (
        lambda: step(ab.sum_of(lambda model, batch: {"main": model(batch).square().sum()}, main=ab.samples()), ROWS),
        LossError,
        {"term": "main", "unit": "samples"},
    ),
    "a sum without a declaration": (
        lambda: step(lambda model, batch: model(batch).square().sum(), ROWS),
        LossError,
        {"term": "loss", "unit": None},
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_errors_have_their_fields(name: str) -> None:
    """An error has the sizes, the step, or the term and its unit that it is about."""
    make, kind, fields = RAISED[name]
    with pytest.raises(kind) as caught:
        make()
    assert {field: getattr(caught.value, field) for field in fields} == fields


def test_a_step_adds_its_number_and_rank() -> None:
    """Out-of-memory and non-finite errors get the step and rank when they leave a step."""
    world = ab.World(rank=1, size=2)
    for given, step in ((CannotRedoError("m"), 4), (CannotRedoError("m", rank=1, step=3), 3)):
        with pytest.raises(CannotRedoError) as caught, failures_reported(world, "engine.step", 4, lambda: None):
            raise given
        assert (caught.value.rank, caught.value.step) == (1, step)
    overflow = NonFiniteError("m", updated=False)
    with pytest.raises(NonFiniteError), failures_reported(world, "engine.step", 4, lambda: None):
        raise overflow
    assert (overflow.step, overflow.updated) == (4, False)
