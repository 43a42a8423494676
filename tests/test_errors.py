"""Errors have fields for programs, which survive pickling and re-raising."""

import copy
import inspect
import pickle
from collections.abc import Iterable
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
def test_fields_travel(kind: type[AnyBatchError], fields: dict[str, Any]) -> None:
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
        kind("only words", unheard_of=1)  # type: ignore[call-arg]
    documented = "".join(base.__doc__ or "" for base in kind.__mro__)
    for name, value in vars(error).items():
        assert value in (None, (), "")
        assert f"    {name}: " in documented


def test_contradicting_sizes_are_fields() -> None:
    """Contradicting sizes are fields of the error."""
    sizes: dict[str, Any] = {"effective_batch_size": 8, "micro_batch_size": 3, "accumulation_steps": 5}
    with pytest.raises(BatchSizeError) as caught:
        ab.Engine(nn.Linear(1, 1), sgd, squares, **sizes)
    assert {name: getattr(caught.value, name) for name in sizes} == sizes
    assert caught.value.world_size == 1


def test_errors_and_warnings_have_codes() -> None:
    """A code is a field of every error and warning, empty where the class says it all, and survives pickling."""
    for kind in ALL:
        assert kind("text").code == ""
        error = pickle.loads(pickle.dumps(kind("text", code="why")))  # noqa: S301 (made here)
        assert (str(error), error.code) == ("text", "why")
    with warns("why"):
        warn_user("text", "why")


def test_a_loss_that_is_not_finite_names_its_step() -> None:
    """The error for a non-finite loss has its step, and whether the update ran, which it does not on a CPU."""
    with ab.Engine(nn.Linear(1, 1), sgd, squares, check_loss=False) as engine:
        engine.step(torch.ones(2, 1))
        with pytest.raises(NonFiniteError) as caught:
            engine.step(torch.full((2, 1), torch.nan))
    assert (caught.value.step, caught.value.updated) == (1, False)


def test_a_loss_that_returns_too_much_names_its_term() -> None:
    """The error for a loss with several values per sample has the term and its unit."""
    loss = ab.sum_of(lambda model, batch: {"main": model(batch).expand(-1, 3)}, main=ab.samples())
    with pytest.raises(LossError) as caught:
        ab.Engine(nn.Linear(1, 1), sgd, loss, check_loss=False).step(torch.ones(2, 1))
    assert (caught.value.term, caught.value.unit) == ("main", "samples")


def test_a_loss_that_is_not_what_was_declared_names_its_term() -> None:
    """The check in the first step names the term, and its unit if declared."""
    batch = torch.arange(6.0).reshape(6, 1)
    added = ab.sum_of(lambda model, part: {"main": model(part).square().sum()}, main=ab.samples())
    with pytest.raises(LossError) as caught:
        ab.Engine(nn.Linear(1, 1), sgd, added).step(batch)
    assert (caught.value.term, caught.value.unit) == ("main", "samples")

    with pytest.raises(LossError) as caught:
        ab.Engine(nn.Linear(1, 1), sgd, lambda model, part: model(part).square().sum()).step(batch)
    assert (caught.value.term, caught.value.unit) == ("loss", None)


def test_a_loss_with_nothing_to_count_names_its_term() -> None:
    """If the count is zero, the error names the only term; with several terms, none."""
    empty = ab.mean_over(squares.function, count=lambda _batch: 0)
    both = ab.sum_of(lambda *_: {}, one=ab.counted(lambda _: 0), other=ab.counted(lambda _: 0))
    for loss, term in ((empty, "loss"), (both, None)):
        with pytest.raises(LossError) as caught:
            ab.Engine(nn.Linear(1, 1), sgd, loss, check_loss=False).step(torch.ones(2, 1))
        assert caught.value.term == term


def test_a_step_fills_in_what_the_place_could_not_know() -> None:
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
