"""Wrong values for any argument of a public function raise an error of anybatch."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core.loss_kinds import Term
from anybatch.errors import AnyBatchError

Data = Mapping[str, Tensor]

WRONG: Mapping[str, Any] = {
    "-1": -1,
    "0": 0,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "True": True,
    "2.5": 2.5,
    "a word": "a",
    "a number as text": "1.0",
    "a list": [1, 2],
    "a dict": {},
    "an object": object(),
    "a tensor": torch.zeros(2),
    "bytes": b"x",
}


def loss_of(model: nn.Module, batch: Data) -> Tensor:
    """Return a mean over samples."""
    outputs: Tensor = model(batch["x"])
    return outputs.pow(2).mean()


def batch_of(num_samples: int = 8) -> dict[str, Tensor]:
    """Return a batch."""
    return {"x": torch.randn(num_samples, 4), "labels": torch.arange(num_samples) % 3}


def engine(**arguments: Any) -> ab.Engine:
    """Return an engine with some arguments replaced."""
    model = nn.Linear(4, 3)
    usual = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": ab.mean_over_samples(loss_of),
        "micro_batch_size": 4,
        "world": ab.World(),
    }
    return ab.Engine(**{**usual, **arguments})


def step(**arguments: Any) -> None:
    """Run a step with some arguments of the engine replaced."""
    with engine(**arguments) as made:
        made.step(batch_of())


def calling(function: Callable[..., object], **usual: Any) -> Callable[..., object]:
    """Return a function that calls another with some of its usual arguments replaced."""
    return lambda **arguments: function(**{**usual, **arguments})


def steps_on(make: Callable[..., Any], **usual: Any) -> Callable[..., None]:
    """Return a function that runs steps on batches or shares, made with some arguments replaced."""

    def run(**arguments: Any) -> None:
        with engine() as made:
            for batch in itertools.islice(make(**{**usual, **arguments}), 2):
                made.step(batch)

    return run


def declaring(declare: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that runs a step with a declared loss or term with some arguments replaced."""

    def run(**arguments: Any) -> None:
        usual = {name: DECLARED[name] for name in parameters_of(declare) if name in DECLARED}
        made = declare(**{**usual, **arguments})
        if isinstance(made, Term):
            made = ab.sum_of(lambda model, batch: {"term": loss_of(model, batch)}, term=made)
        step(loss=made)

    return run


def on_engine(method: str, **usual: Any) -> Callable[..., None]:
    """Return a function that calls a method of an engine with some arguments replaced."""

    def run(**arguments: Any) -> None:
        with engine() as made:
            getattr(made, method)(**{**usual, **arguments})

    return run


def returning(loss: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a function that runs a step with a loss that returns a wrong value."""
    return lambda value: step(loss=loss(value))


def parameters_of(function: Callable[..., Any], *left_out: str) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    return tuple(name for name in inspect.signature(function).parameters if name not in ("self", *left_out))


PLAN = {
    "what": nn.Linear(4, 3),
    "optimizer": torch.optim.SGD,
    "loss": loss_of,
    "sample": {"x": torch.ones(1, 4)},
    "device": "24GiB",
    "effective_batch_size": 8,
    "micro_batch_size": 2,
    "proposals": False,
}
DECLARED = {"function": loss_of, "encode": loss_of, "count": len, "labels": "labels", "shift": False}
"""Usual arguments of declarations of losses."""
FUNCTIONS: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Engine": (step, parameters_of(ab.Engine)),
    # Any object may be a data set, a sampler, or a num_workers that torch rejects.
    "batches": (
        steps_on(ab.batches, dataset=[{"x": torch.ones(4)}] * 8, effective_batch_size=4),
        parameters_of(ab.batches, "dataset", "sampler", "num_workers"),
    ),
    "shares": (
        steps_on(ab.shares, loader=[batch_of(3)] * 3, effective_batch_size=4, world=ab.World()),
        parameters_of(ab.shares),
    ),
    "plan": (calling(ab.plan, **PLAN), parameters_of(ab.plan, "sample", "changes", "loss", "what")),
    "check": (calling(ab.check, model=nn.Linear(4, 3), loss=loss_of, batch=batch_of()), parameters_of(ab.check)),
    "advise": (calling(ab.advise, source="no log"), parameters_of(ab.advise)),
    "token_budget": (calling(ab.token_budget, tokens=64), parameters_of(ab.token_budget)),
    "RunConfig": (
        calling(ab.RunConfig, effective_batch_size=4, learning_rate=0.1, epochs=1),
        parameters_of(ab.RunConfig),
    ),
    **{
        name: (declaring(declare), parameters_of(declare))
        for name, declare in inspect.getmembers(ab, inspect.isfunction)
        if declare.__module__ == ab.LossSum.__module__ and declare is not ab.sum_of
    },
    "a loss": (returning(lambda value: ab.mean_over_samples(lambda *_: value)), ("value",)),
    "a bare loss": (returning(lambda value: lambda *_: value), ("value",)),
    "a count": (returning(lambda value: ab.mean_over(loss_of, lambda _: value)), ("value",)),
    "a counted sum": (
        returning(lambda value: lambda model, batch: ab.LossSum(loss_of(model, batch), value)),
        ("value",),
    ),
    "evaluate": (on_engine("evaluate", batches=[batch_of()]), parameters_of(ab.Engine.evaluate, "averaged")),
    "save": (on_engine("save", folder="a"), parameters_of(ab.Engine.save)),
    "load": (on_engine("load"), ("path",)),
    "save_also": (on_engine("save_also"), ("thing",)),
    "reschedule": (on_engine("reschedule"), ("scheduler",)),
    "JsonlLog": (
        lambda **arguments: ab.JsonlLog(**{"path": "log", **arguments}).close(),
        ("path", "num_steps_per_flush"),
    ),
}


@contextmanager
def raw_errors(errors: list[str], call: str) -> Iterator[None]:
    """Record errors that are not anybatch's; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except AnyBatchError:
            pass
        except Exception as error:  # noqa: BLE001 (any class but anybatch's own)
            errors.append(f"{call}: {type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_arguments_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function accepts a value, or raises an error of anybatch."""
    monkeypatch.chdir(tmp_path)
    function, parameters = FUNCTIONS[name]
    errors: list[str] = []
    for parameter, (shown, value) in itertools.product(parameters, WRONG.items()):
        with raw_errors(errors, f"{parameter}={shown}"):
            function(**{parameter: value})
    assert parameters
    assert errors == []


def test_raw_errors_are_found() -> None:
    """An error that is not anybatch's is recorded."""
    errors: list[str] = []
    with raw_errors(errors, "f(x=1)"):
        dict[str, int]()["x"]
    assert errors == ["f(x=1): KeyError: 'x'"]
