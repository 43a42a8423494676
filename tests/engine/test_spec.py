"""Engines built from a spec, and freed when they are dropped."""

import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.engine.arguments import Hardware, TrainSpec
from tests.engine.cases import CASES, InMemory
from tests.ranks_fixture import Ranks


def spec_of(model: torch.nn.Module, **changes: Any) -> TrainSpec:
    """Return a spec of a ragged case."""
    values: dict[str, Any] = {
        "model": model,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01),
        "loss": CASES["ragged"].loss,
        "clip": 0.5,
        "average_decay": 0.9,
        "seed": 3,
    }
    return TrainSpec(**{**values, **changes})


def test_a_spec_builds_an_equal_engine() -> None:
    """Two steps of an engine from a spec and one from arguments are bitwise equal."""
    ends = []
    for made_of_spec in (False, True):
        model, batch = CASES["ragged"].model(), CASES["ragged"].batch()
        spec = spec_of(model)
        if made_of_spec:
            engine = ab.Engine.from_spec(spec, Hardware(micro_batch_size=3))
        else:
            values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
            engine = ab.Engine(**values, micro_batch_size=3)
        with engine:
            reports = [engine.step(InMemory(batch)) for _ in range(2)]
            assert engine.average is not None
            averages = list(engine.average.weights.values())
        ends.append([*model.parameters(), *averages, *(torch.tensor(report.loss) for report in reports)])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_dropped_engine_is_freed_without_the_garbage_collector() -> None:
    """No part of an engine references it, so two engines in a row need the memory of one."""
    model = CASES["ragged"].model()
    engine = ab.Engine.from_spec(spec_of(model), Hardware(micro_batch_size=3))
    engine.step(InMemory(CASES["ragged"].batch()))
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


def freed_models(strategy: str) -> list[bool]:
    """Run on every rank: step and drop engines without closing; return whether models and groups are freed."""
    gone = []
    for _ in range(2):
        model = CASES["ragged"].model()
        engine = ab.Engine.from_spec(spec_of(model), Hardware(micro_batch_size=3, strategy=strategy))
        engine.step(InMemory(CASES["ragged"].batch()))
        control = engine.world._control  # noqa: SLF001
        watched = weakref.ref(model), weakref.ref(control)
        del engine, model, control
        gc.collect()
        gone.append([one() for one in watched] == [None, None])
    return gone


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp"])
def test_a_dropped_engine_frees_its_model(strategy: str, two_ranks: Ranks) -> None:
    """DDP's reducer and other native objects do not keep the model or world of a dropped engine alive."""
    assert two_ranks.run(freed_models, strategy) == [[True, True], [True, True]]
