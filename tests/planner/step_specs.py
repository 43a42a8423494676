"""Build a `StepSpec` from the fields of `TrainSpec` and `StepSpec` in one call."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from anybatch.engine.arguments import TrainSpec
from anybatch.engine.user_code import Model
from anybatch.planner.step_spec import StepSpec

_TRAINED = {field.name for field in dataclasses.fields(TrainSpec)}


def step_spec(model: Callable[[], Model] | nn.Module, **fields: Any) -> StepSpec:
    """Return the spec of a step, with a model that is created for each plan or with an existing module.

    Args:
        model: function () -> model, or a module.
        **fields: fields of `TrainSpec` and of `StepSpec`.
    """
    trained = {name: value for name, value in fields.items() if name in _TRAINED}
    rest = {name: value for name, value in fields.items() if name not in _TRAINED}
    if isinstance(model, nn.Module):
        return StepSpec(train=TrainSpec(model=model, **trained), **rest)
    return StepSpec(train=lambda: TrainSpec(model=model(), **trained), **rest)


def changed(spec: StepSpec, **fields: Any) -> StepSpec:
    """Return a copy of a step with some fields of `TrainSpec` replaced; the model is given as a function.

    Args:
        spec: the step, whose model is a function.
        **fields: fields of `TrainSpec`.
    """
    make = spec.train
    assert not isinstance(make, TrainSpec)
    if "model" in fields:
        model = fields.pop("model")
        return dataclasses.replace(spec, train=lambda: dataclasses.replace(make(), model=model(), **fields))
    return dataclasses.replace(spec, train=lambda: dataclasses.replace(make(), **fields))
