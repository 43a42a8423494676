"""Engines built from a spec, and the append-only record of decisions."""

import dataclasses
import gc
import inspect
import weakref
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.decisions import Decisions
from anybatch.errors import UserError
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


def test_a_spec_makes_the_engine_of_its_fields() -> None:
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


def test_the_engine_takes_every_field_of_both_values() -> None:
    """Every field of a spec or the hardware is an argument of the engine, and the reverse."""
    arguments = set(inspect.signature(ab.Engine.__init__).parameters) - {"self", "observer"}
    fields = {field.name for value in (TrainSpec, Hardware) for field in dataclasses.fields(value)}

    assert fields <= arguments
    assert arguments - fields == set()


def test_a_scheduler_is_made_for_the_optimizer_that_the_engine_makes() -> None:
    """A scheduler function gets the engine's optimizer and is stepped once per update, like an instance."""
    model = CASES["ragged"].model()
    spec = spec_of(model, scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5))
    with ab.Engine.from_spec(spec, Hardware(micro_batch_size=3)) as engine:
        engine.step(InMemory(CASES["ragged"].batch()))
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def test_what_is_no_scheduler_is_refused() -> None:
    """A scheduler function that returns an object without `step` is refused."""
    model = CASES["ragged"].model()
    with pytest.raises(UserError, match="has no method step"):
        ab.Engine.from_spec(spec_of(model, scheduler=lambda _: 0.1))


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
def test_a_dropped_engine_lets_its_model_go(strategy: str, two_ranks: Ranks) -> None:
    """DDP's reducer and other native objects do not keep the model or world of a dropped engine alive."""
    assert two_ranks.run(freed_models, strategy) == [[True, True], [True, True]]


def test_decisions_are_only_added_to() -> None:
    """Decisions map names to the newest text and keep the history; items cannot be set."""
    decisions = Decisions()
    for text in ("16, as named", "", "8, because 16 ran out of memory"):
        decisions.add("micro_batch_size", text)
    decisions.add("loss", "as declared")

    assert dict(decisions) == {"micro_batch_size": "8, because 16 ran out of memory", "loss": "as declared"}
    assert [decision.text for decision in decisions.history][:2] == ["16, as named", "8, because 16 ran out of memory"]
    with pytest.raises(TypeError):
        decisions["loss"] = "otherwise"  # type: ignore[index]
