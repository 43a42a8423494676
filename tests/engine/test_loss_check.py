"""The first step checks the declaration of the loss: wrong ones raise an error, right ones pass, no state changes.

Some tests reach into the engine's modules, because a check must leave everything in them unchanged.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.engine.micro_batches import RankShare
from anybatch.errors import AnyBatchError, LossError
from anybatch.parallel.dtensors import local_part
from tests.engine.cases import Batch, cut, sentences, share_bounds, vectors
from tests.engine.loss_declarations import (
    HOLDS,
    RIGHT,
    WRONG,
    Classifier,
    Declared,
    Diagnoses,
    batch_of,
    engine_for,
    from_inside_of_vectors,
    of_samples,
    samples,
)
from tests.raising import warns
from tests.ranks_fixture import Ranks


@pytest.mark.parametrize("name", WRONG)
def test_wrong_declarations_are_caught(name: str) -> None:
    """The error names the cause and the likely right declaration, and nothing has changed."""
    case = WRONG[name]
    with engine_for(case) as engine:
        before = {key: value.clone() for key, value in engine._parts.modules.state_dict().items()}  # noqa: SLF001
        with pytest.raises(LossError) as caught:
            engine.step(batch_of(case))
        after = engine._parts.modules.state_dict()  # noqa: SLF001
    cause, remedy = case.words

    assert caught.value.cause == cause
    assert remedy in str(caught.value)
    assert "check_loss=False" in str(caught.value)
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert engine.num_steps == 0


@pytest.mark.parametrize("name", RIGHT)
def test_right_declarations_are_silent(name: str) -> None:
    """A right declaration passes the check on the first batch, with dropout and BatchNorm in the model."""
    case, heard = RIGHT[name], Diagnoses()
    with engine_for(case, observer=heard) as engine:
        engine.step(batch_of(case))

    is_taken = name == "one number, undeclared"
    assert heard.codes == ["loss_taken_as_mean_over_samples"] * is_taken
    assert ("it is one" if is_taken else HOLDS) in engine.decisions["loss"]


def said_on_ranks(name: str, strategy: str, idle: bool) -> tuple[str, str]:
    """Run on every rank: make a step with a wrong declaration; return the error's class and cause."""
    world = ab.World.from_environment()
    case = WRONG[name]
    batch = batch_of(case)
    weights = [1, 0] if idle and strategy != "fsdp" else [2, 1]  # fsdp needs samples on every rank
    start, stop = share_bounds(len(next(iter(batch.values()))), weights)[world.rank]
    share = RankShare(cut(batch, start, stop) if stop > start else None)
    with engine_for(case, world=world, strategy=strategy) as engine:
        try:
            engine.step(share)
        except AnyBatchError as error:
            return type(error).__name__, str(getattr(error, "cause", ""))
    return "", engine.decisions["loss"]


@pytest.mark.parametrize(
    ("name", "strategy", "idle"),
    [
        ("tokens as samples", "all_reduce", True),
        ("contrastive as samples", "ddp", False),
        ("a sum as a mean", "zero1", True),
        ("weights forgotten, inside", "fsdp", False),
    ],
)
def test_ranks_agree(name: str, strategy: str, idle: bool, two_ranks: Ranks) -> None:
    """Both ranks raise the same error, even if one of them has no samples."""
    one, other = two_ranks.run(said_on_ranks, name, strategy, idle)

    assert one == other
    assert one[0] == "LossError"
    # Under fsdp all ranks make the same number of extra runs, so some causes stay unknown.
    assert one[1] in (WRONG[name].words[0], "unknown" if strategy == "fsdp" else "")


def steps_on_ranks(strategy: str) -> tuple[str, list[torch.Tensor], str, list[torch.Tensor]]:
    """Run on every rank: make steps with and without the check; return the decisions and the final states."""
    world = ab.World.from_environment()
    found: list[Any] = []
    for check_loss in (True, False):
        case = RIGHT["tokens"]
        batch = batch_of(case)
        start, stop = share_bounds(len(batch["words"]), [2, 1])[world.rank]
        with engine_for(case, world=world, strategy=strategy, check_loss=check_loss) as engine:
            for _ in range(2):
                engine.step(cut(batch, start, stop))
            values = engine._parts.modules.state_dict().values()  # noqa: SLF001
            found += [engine.decisions.get("loss", ""), [local_part(one).clone() for one in values]]
    return tuple(found)


@pytest.mark.parametrize("strategy", ["all_reduce", "ddp", "zero1", "fsdp"])
def test_the_check_changes_no_state_on_ranks(strategy: str, two_ranks: Ranks) -> None:
    """On two ranks, a run ends in bitwise equal states with and without the check."""
    for said, checked, _, unchecked in two_ranks.run(steps_on_ranks, strategy):
        assert HOLDS in said
        assert all(torch.equal(one, other) for one, other in zip(checked, unchecked, strict=True))


# Undecidable cases


def unmasked(number: int) -> Batch:
    """Return sentences without masked targets, so that samples and targets count alike."""
    return {**(batch := sentences(number)), "labels": batch["words"].clone()}


def test_a_wrong_declaration_is_found_in_step_four() -> None:
    """A token mean declared over samples passes while all samples have equally many targets; step four finds it."""
    case, heard = WRONG["tokens as samples"], Diagnoses()
    with engine_for(case, observer=heard) as engine:
        engine.step(unmasked(14))
        assert HOLDS in engine.decisions["loss"]
        engine.step(sentences())
        engine.step(sentences())
        assert heard.codes == []
        with pytest.raises(LossError) as caught:
            engine.step(sentences())
    assert caught.value.cause == "mean"
    assert engine.num_steps == 3


def test_one_sample_at_a_time_is_judged_from_four() -> None:
    """With micro-batches of one, the check combines several; a batch of a single sample is not checked."""
    case = WRONG["tokens as samples"]
    with engine_for(case, micro_batch_size=1) as engine, pytest.raises(LossError):
        engine.step(sentences())
    with engine_for(RIGHT["tokens"], micro_batch_size=1) as engine:
        engine.step(cut(sentences(), 0, 1))
    assert "only one sample" in engine.decisions["loss"]


def test_running_out_of_memory_warns() -> None:
    """A check that runs out of memory causes a warning, and the step still runs."""

    class Full(Classifier):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            if ab.in_trial_run():
                message = "full"
                raise torch.OutOfMemoryError(message)
            return super().forward(x, y)

    case = Declared(Full, lambda: vectors(23), RIGHT["samples"].loss)
    with engine_for(case) as engine, warns("loss_not_checked"):
        engine.step(vectors(23))
    assert "ran out of memory" in engine.decisions["loss"]


def test_running_out_of_memory_in_the_diagnosis_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    """An out-of-memory error outside of the compared runs is reported as such, without torch's long message."""

    def judge(*_: object, **__: object) -> None:
        message = "CUDA out of memory. Tried to allocate 2.00 GiB"
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr("anybatch.engine.loss_check.check.judge", judge)
    case = Declared(Classifier, lambda: vectors(23), RIGHT["samples"].loss)
    with engine_for(case) as engine, warns("loss_not_checked"):
        engine.step(vectors(23))
    assert "it ran out of memory" in engine.decisions["loss"]


def test_only_four_steps_are_checked() -> None:
    """The check runs in steps 1, 4, 8 and 16; in other steps the model is called once per micro-batch."""
    called: list[int] = []

    def counting(model: nn.Module, batch: Batch) -> torch.Tensor:
        called.append(1)
        return of_samples(model, batch)

    calls = []
    with engine_for(Declared(Classifier, samples, lambda: ab.mean_over_samples(counting))) as engine:
        for _ in range(17):
            called.clear()
            engine.step(samples())
            calls.append(len(called))
    assert [step for step, number in enumerate(calls, 1) if number > 3] == [1, 4, 8, 16]
    assert min(calls) == 3


def test_the_check_can_be_disabled() -> None:
    """check_loss=False accepts a wrong declaration."""
    with engine_for(WRONG["tokens as samples"], check_loss=False) as engine:
        engine.step(sentences())
    assert "loss" not in engine.decisions


# Functions that are not declared


def test_an_undeclared_mean_trains_like_a_declared_one() -> None:
    """A bare function that returns one number trains as if it had been declared a mean over samples."""
    found = []
    for case in (RIGHT["one number, undeclared"], RIGHT["samples"]):
        with engine_for(case) as engine:
            reports = [engine.step(batch_of(case)) for _ in range(2)]
            trained = [*engine._parts.modules.parameters()]  # noqa: SLF001
            found.append(([float(one.loss) for one in reports], engine.evaluate([vectors(9)]), trained))
    (losses, metrics, trained), (expected, expected_metrics, references) = found

    assert losses == pytest.approx(expected, rel=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    for one, other in zip(trained, references, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_resumed_run_keeps_the_verdict(tmp_path: Path) -> None:
    """A result from before a checkpoint stays valid after it, even if the next batch alone could not decide."""
    case = RIGHT["one number, undeclared"]
    with engine_for(case) as engine:
        engine.step(vectors(23))
        saved = engine.save(tmp_path)
    with engine_for(case) as engine:
        engine.load(saved)
        engine.step({**vectors(23), "y": torch.ones(23, dtype=torch.long)})
    assert engine.num_steps == 2


# No side effects


def watched_state(engine: ab.Engine, hooked: list[str]) -> list[Any]:
    """Return everything that a check must leave unchanged."""
    modules: nn.Module = engine._parts.modules  # noqa: SLF001
    plain = [
        {key: value for key, value in vars(module).items() if isinstance(value, (bool, float, str, type(None)))}
        for module in modules.modules()
    ]
    hooks = [[*vars(module)["_forward_hooks"]] for module in modules.modules()]
    tensors = [(id(one), one.clone()) for one in [*modules.parameters(), *modules.buffers()]]
    grads = [parameter.grad for parameter in modules.parameters()]
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    return [plain, hooks, tensors, grads, rng, [*hooked]]


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("kind", ["holds", "broken", "fails", "interrupted"])
def test_the_check_changes_no_state(kind: str) -> None:
    """The check leaves parameters, buffers, modes, hooks, gradients and random state unchanged, even after errors."""
    seen: list[list[Any]] = []
    hooked: list[str] = []
    calls: list[int] = []

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        calls.append(1)
        batch["x"].mul_(2.0)
        random.random()
        np.random.rand()
        value = from_inside_of_vectors(model, {"x": batch["x"], "y": batch["y"]})
        if kind == "fails" or (kind == "interrupted" and len(calls) == 4):
            raise {"fails": ZeroDivisionError, "interrupted": KeyboardInterrupt}[kind]
        return value * len(batch["x"]) if kind == "broken" else value

    case = Declared(Classifier, lambda: vectors(23), lambda: ab.mean_over_samples(loss))
    with engine_for(case, rng=None) as engine:
        engine._parts.modules.get_submodule("body.3").eval()  # noqa: SLF001
        engine._parts.modules.get_parameter("head.weight").register_hook(lambda _: hooked.append("head"))  # noqa: SLF001
        batch = vectors(23)
        seen.append([*watched_state(engine, hooked), *(value.clone() for value in batch.values())])
        look = engine._parts.check.check_declaration  # noqa: SLF001

        def looking(*args: Any) -> Any:
            try:
                return look(*args)
            finally:
                seen.append([*watched_state(engine, hooked), *(value.clone() for value in batch.values())])

        engine._parts.check.check_declaration = looking  # type: ignore[assignment, method-assign]  # noqa: SLF001
        try:
            engine.step(batch)
        except (LossError, ZeroDivisionError, KeyboardInterrupt):
            assert kind != "holds"
    assert len(seen) == 2
    for before, after in zip(*seen, strict=True):
        assert same(before, after)
