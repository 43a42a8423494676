"""Steps to plan, from fields of `TrainSpec` and `StepSpec` in one go."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from anybatch.engine.inputs import Model
from anybatch.engine.spec import TrainSpec
from anybatch.planner.trace.step_spec import StepSpec

_TRAINED = {field.name for field in dataclasses.fields(TrainSpec)}


def step_spec(model: Callable[[], Model] | nn.Module, **fields: Any) -> StepSpec:
    """Return the step of a model that is made each time it is planned, or of one that is there.

    Args:
        model: function () -> model, or a module.
        **fields: of `TrainSpec` and of `StepSpec`.
    """
    trained = {name: value for name, value in fields.items() if name in _TRAINED}
    rest = {name: value for name, value in fields.items() if name not in _TRAINED}
    if isinstance(model, nn.Module):
        return StepSpec(train=TrainSpec(model=model, **trained), **rest)
    return StepSpec(train=lambda: TrainSpec(model=model(), **trained), **rest)


def changed(spec: StepSpec, **fields: Any) -> StepSpec:
    """Return a step that trains the same but for some fields of `TrainSpec`; a model is given as a function.

    Args:
        spec: the step, whose model is made anew each time.
        **fields: of `TrainSpec`.
    """
    make = spec.train
    assert not isinstance(make, TrainSpec)
    if "model" in fields:
        model = fields.pop("model")
        return dataclasses.replace(spec, train=lambda: dataclasses.replace(make(), model=model(), **fields))
    return dataclasses.replace(spec, train=lambda: dataclasses.replace(make(), **fields))
