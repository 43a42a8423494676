"""The engine times padded and packed batches (on a simulated clock) and uses the faster layout."""

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anybatch as ab
from anybatch.core.splitting import Cut
from anybatch.core.token_budget import SampleLengths, TokenBudget, plan_by_length
from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.data.prefetch import Prefetcher
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch
from anybatch.engine.micro_batch_size import budget_trials
from anybatch.engine.micro_batch_size.budget_trials import SampledUnit, sampled_units, seconds_of_steps
from anybatch.engine.micro_batch_size.search import TrialResult
from anybatch.errors import DataError
from anybatch.testing import relative_error
from tests.engine.length_cases import (
    DECLARED,
    LENGTHS,
    Language,
    Sentences,
    SimulatedDevice,
    either_on_ranks,
    expected_gradients,
    loss,
)
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
FASTER = {"packed": 0.5, "padded": 2.0}
"""Time of a packed token relative to a padded one, by the layout that is faster then."""


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make small steps worth timing."""
    monkeypatch.setattr(budget_trials, "WORTH_TIMING", 0)


def engine_on(
    device: SimulatedDevice, model: Any = None, tokens: int = 40, declared: Any = DECLARED, **settings: Any
) -> ab.Engine:
    """Return an engine with a token budget, on the clock of a simulated device."""
    model = device.runs(Language() if model is None else model)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    budget = ab.token_budget(tokens)
    return device.times(ab.Engine(model, optimizer, declared, micro_batch_size=budget, **settings))


def batches_of(**settings: Any) -> Any:
    """Return batches that can be padded and packed."""
    given: dict[str, Any] = {"effective_batch_size": 12, "lengths": LENGTHS, "collate": PaddedOrPacked(), "epochs": 2}
    return ab.batches(Sentences(), **given | settings)


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize(("layout", "num_workers"), [("packed", 0), ("padded", 1)])
@pytest.mark.slow
def test_the_faster_layout_is_taken(layout: str, num_workers: int) -> None:
    """Every batch uses the faster layout, the choice is reported, and the gradient equals the unsplit batch's."""
    device, model = SimulatedDevice(FASTER[layout]), Language()
    with engine_on(device, model) as engine:
        for batch in batches_of(num_workers=num_workers):
            found = engine.gradients(batch)
            assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
            plan = engine.step(batch).plan
            assert device.newest == layout
            if layout == "packed":  # without padding every micro-batch but one is more than half full
                tokens = [sum(LENGTHS[batch.sample_ids[place]] for place in plan.positions(one)) for one in plan.units]
                assert sum(2 * one <= 40 for one in tokens) <= 1
            model.load_state_dict(Language().state_dict())
        assert engine.decisions["layout"].startswith(f"{layout}, measured: ")


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("collate", [Padded(), Packed(), PaddedOrPacked()], ids=["padded", "packed", "either"])
def test_batches_are_cut_smaller_where_a_step_is_faster_then(collate: Any, tmp_path: Any) -> None:
    """If micro-batches of more than 50 tokens take twice as long, a budget of 80 tokens is cut at 40, in any layout.

    The cap is reported and saved, and the gradient equals the unsplit batch's.
    """
    batch = next(iter(batches_of(collate=collate)))
    device = SimulatedDevice(0.9, cached=50)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        engine.gradients(batch)  # chooses the cap
        device.largest = 0
        assert relative_error(engine.gradients(batch), expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert 20 < device.largest <= 40
        assert "; cut at 40, because a step then takes " in engine.decisions["micro_batch_size"]
        engine.step(batch)
        engine.save(tmp_path / "saved")
    device = SimulatedDevice(0.9)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        engine.step(batch)
        assert 20 < device.largest <= 40


@pytest.mark.usefixtures("_timed")
def test_a_cap_that_does_not_run_is_not_taken() -> None:
    """If memory has room for fewer tokens than the budget, the cap is one that runs, and the gradient is right."""
    batch = next(iter(batches_of(collate=Padded())))
    device = SimulatedDevice(1.0, room=50)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        assert relative_error(engine.gradients(batch), expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert engine.decisions["micro_batch_size"].endswith("; cut at 40, because larger ones do not run")


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("collate", [Padded(), PaddedOrPacked()], ids=["padded", "either"])
def test_where_nothing_can_be_timed_the_step_says_why(collate: Any) -> None:
    """A loss function that fails in every trial run raises its own error from the step."""

    def fails(_model: Any, _batch: Any) -> Any:
        message = "of the user"
        raise ZeroDivisionError(message)

    with (
        engine_on(
            SimulatedDevice(1.0), declared=ab.mean_over_tokens(fails, labels="labels"), check_loss=False
        ) as engine,
        pytest.raises(ZeroDivisionError, match="of the user"),
    ):
        engine.step(next(iter(batches_of(collate=collate))))


@pytest.mark.usefixtures("_timed")
def test_workers_load_ahead_in_the_layout_that_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step, workers never restart: they prefetch samples in the chosen layout."""
    starts: list[Prefetcher[Any, Any]] = []
    start = Prefetcher._start  # noqa: SLF001 (restarts the workers)

    def counted(self: Prefetcher[Any, Any], keys: Any) -> None:
        starts.append(self)
        start(self, keys)

    monkeypatch.setattr(Prefetcher, "_start", counted)
    with engine_on(SimulatedDevice(FASTER["packed"]), check_loss=False) as engine:  # the check would load samples again
        for number, batch in enumerate(batches_of(num_workers=1)):
            engine.step(batch)
            if not number:
                starts.clear()
    assert not starts


@pytest.mark.usefixtures("_timed")
def test_a_stream_is_laid_out_as_is_faster() -> None:
    """Samples of a stream, which are read before the cut, are collated in the faster layout."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Sentences()[index] for index in range(len(LENGTHS))])

    device = SimulatedDevice(FASTER["packed"])
    batches = ab.batches(Stream(), effective_batch_size=9, shuffle=False, lengths="input_ids", collate=PaddedOrPacked())
    with engine_on(device) as engine:
        for batch in batches:
            found = engine.gradients(batch)
            assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
            assert device.newest == "packed"


def test_all_ranks_take_the_layout_of_the_first(two_ranks: Ranks) -> None:
    """If clocks differ between ranks, all ranks use the layout of rank 0, and the gradient is right."""
    for layout, factor in FASTER.items():
        for error, taken in two_ranks.run(either_on_ranks, factor, 1 / factor):
            assert taken.startswith(layout)
            assert error <= TOLERANCE


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("layout", FASTER)
def test_a_layout_is_kept_in_checkpoints(tmp_path: Any, layout: str) -> None:
    """A resumed run keeps its layout, even if the clock has changed; with another budget it measures again."""
    other = "padded" if layout == "packed" else "packed"
    with engine_on(SimulatedDevice(FASTER[layout])) as engine:
        engine.step(next(iter(batches_of())))
        engine.save(tmp_path / "saved")
    for tokens, taken in ((40, layout), (60, other)):
        device = SimulatedDevice(FASTER[other])
        with engine_on(device, tokens=tokens) as engine:
            engine.load(tmp_path / "saved")
            engine.step(next(iter(batches_of())))
            assert device.newest == taken
            words = f"{taken}, as in the checkpoint" if taken == layout else f"{taken}, measured: "
            assert engine.decisions["layout"].startswith(words)


@pytest.mark.usefixtures("_timed")
def test_a_run_that_padded_finds_the_faster_layout_when_it_may(tmp_path: Any) -> None:
    """A run resumed from a padded-only checkpoint keeps its micro-batch cost and measures the layout."""
    with engine_on(SimulatedDevice(FASTER["packed"])) as engine:
        engine.step(next(iter(batches_of(collate=Padded()))))
        assert "layout" not in engine.decisions
        engine.save(tmp_path / "saved")
    device = SimulatedDevice(FASTER["packed"])
    with engine_on(device) as engine:
        engine.load(tmp_path / "saved")
        engine.step(next(iter(batches_of())))
        assert device.newest == "packed"
        assert engine.decisions["micro_batch_size"].endswith("as in the checkpoint")


@pytest.mark.usefixtures("_timed")
def test_a_cost_that_is_named_stays() -> None:
    """A given `fixed_tokens` is used without measuring; the layout is still measured."""
    device = SimulatedDevice(FASTER["packed"])
    model = device.runs(Language())
    budget = ab.token_budget(40, fixed_tokens=7)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with device.times(ab.Engine(model, optimizer, DECLARED, micro_batch_size=budget)) as engine:
        batch = next(iter(batches_of()))
        found = engine.gradients(batch)
        assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert device.newest == "packed"
        assert "micro_batch_size" not in engine.decisions


class Leaking(Language):
    """Accepts packed samples, but attends across them."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        """Attend to everything before a token."""
        if position_ids is not None:
            attention_mask = torch.ones_like(input_ids)
        return super().forward(input_ids, attention_mask, None)


class OnlyPadded(Language):
    """Rejects packed samples."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        """Require a mask."""
        if attention_mask is None:
            message = "no mask"
            raise TypeError(message)
        return super().forward(input_ids, attention_mask, position_ids)


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize(("model", "reason"), [(Leaking, "mixes packed samples"), (OnlyPadded, "TypeError: no mask")])
def test_a_model_that_cannot_be_packed_for_is_padded_for(model: Callable[[], Language], reason: str) -> None:
    """A model that cannot take packed samples gets padded ones, even if they are slower; the reason is reported."""
    device = SimulatedDevice(0.01)
    with engine_on(device, model()) as engine:
        batch = next(iter(batches_of()))
        found = engine.gradients(batch)
        assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
        engine.step(batch)
        assert device.newest == "padded"
        assert engine.decisions["layout"].startswith("padded, because the model ")
        assert reason in engine.decisions["layout"]


@pytest.mark.usefixtures("_timed")
def test_a_mean_over_samples_is_padded_for() -> None:
    """A mean over samples runs on padded batches, because a packed micro-batch has a single row."""

    def per_sample(model: Any, batch: Any) -> Any:
        return torch.stack(
            [
                loss(model, {name: row[None] for name, row in zip(batch, rows, strict=True)})
                for rows in zip(*batch.values(), strict=True)
            ]
        ).mean()

    device = SimulatedDevice(0.01)
    lengths = [6] * 8
    batches = ab.batches(Sentences(lengths), effective_batch_size=8, lengths=lengths, collate=PaddedOrPacked())
    with engine_on(device, declared=ab.mean_over_samples(per_sample)) as engine:
        engine.step(next(iter(batches)))
        assert device.newest == "padded"
        assert "mean over samples" in engine.decisions["layout"]


@pytest.mark.usefixtures("_timed")
def test_random_numbers_of_samples_are_padded_for() -> None:
    """With rng="per_sample" samples are padded: random numbers are drawn by row, and packed samples share one."""
    device = SimulatedDevice(0.01)
    with engine_on(device, rng="per_sample") as engine:
        engine.step(next(iter(batches_of())))
        assert device.newest == "padded"
        assert "rng='per_sample'" in engine.decisions["layout"]


def test_small_steps_are_padded() -> None:
    """Samples are padded if a step is too short to time, and in evaluations before the first step."""
    device = SimulatedDevice(0.01)
    with engine_on(device) as engine:
        engine.evaluate(batches_of(epochs=1))
        assert device.newest == "padded"
        engine.step(next(iter(batches_of())))
        assert engine.decisions["layout"] == "padded, because a step is too short to be worth timing"


@pytest.mark.usefixtures("_timed")
def test_batches_that_are_kept_have_a_layout_too() -> None:
    """Cached batches and subsets of batches use the chosen layout and give the same gradient."""
    whole = next(iter(batches_of()))
    for batch in (CachedBatch(whole), BatchSubset(whole, range(2, 11))):
        device = SimulatedDevice(FASTER["packed"])
        with engine_on(device) as engine:
            for _ in range(2):
                found = engine.gradients(batch)
                assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
                assert device.newest == "packed"


@pytest.mark.parametrize(
    "wrong",
    [
        {"padded": Padded(shapes=((4, 8),))},
        {"padded": Padded(longest=4)},
        {"packed": Packed(shift=False)},
    ],
)
def test_layouts_that_differ_in_more_are_refused(wrong: Any) -> None:
    """Padded and packed layouts that treat samples differently raise an error."""
    with pytest.raises(DataError):
        PaddedOrPacked(**wrong)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8)
    | st.lists(st.integers(20, 60), min_size=30, max_size=60),
    packed=st.booleans(),
    fixed=st.floats(0, 50),
)
def test_sampled_micro_batches_stand_for_all(lengths: list[int], packed: bool, fixed: float) -> None:
    """At most eight micro-batches are sampled, and under the cost model their weighted cost equals the total."""
    budget = TokenBudget(tokens=60, fixed_tokens=fixed)
    of_batch = SampleLengths(tokens=lengths, packed=packed)

    def cost(positions: Any) -> float:
        tokens = [lengths[place] for place in positions]
        return fixed + float(sum(tokens) if packed else len(tokens) * max(tokens))

    plan = plan_by_length(of_batch, 1, Cut(), budget)
    chosen = sampled_units(of_batch, budget)
    assert len(chosen) == min(8, len(plan.units))
    assert sum(one.factor * cost(one.positions) for one in chosen) == pytest.approx(
        sum(cost(plan.positions(unit)) for unit in plan.units)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_sampled_micro_batches_stand_for_long_and_short_samples(packed: bool) -> None:
    """If tokens of long samples take half as long again, the sampled micro-batches estimate the total within 3%.

    Short and long samples fill micro-batches to the same cap, so their weights do not distinguish them.
    """
    draw = random.Random(0)
    lengths = [draw.randint(20, 40) for _ in range(116)] + [draw.randint(400, 512) for _ in range(12)]
    budget = TokenBudget(tokens=512, fixed_tokens=40.0)
    of_batch = SampleLengths(tokens=lengths, packed=packed)

    def seconds(positions: Any) -> float:
        tokens = [lengths[int(place)] for place in positions]
        held = tokens if packed else [max(tokens)] * len(tokens)
        return 40.0 + sum(one * (1.5 if own > 100 else 1.0) for one, own in zip(held, tokens, strict=True))

    plan = plan_by_length(of_batch, 1, Cut(), budget)
    assert len(plan.units) > 8
    all_of_them = sum(seconds(plan.positions(unit)) for unit in plan.units)
    sampled = sum(one.factor * seconds(one.positions) for one in sampled_units(of_batch, budget))
    assert sampled == pytest.approx(all_of_them, rel=0.03)


class Timed:
    """Replaces trial runs by a given result."""

    def __init__(self, result: TrialResult) -> None:
        self._result = result

    def run(self, size: int, most: int) -> TrialResult:
        """Return the result."""
        del size, most
        return self._result


def test_ways_are_timed_in_turns() -> None:
    """Alternatives are timed three times, interleaved; the weighted median counts, and a far slower one runs once."""
    times = {
        "first": iter([2.0, 3.0, 4.0, 1.0, 3.0, 5.0]),
        "second": iter([2.5, 2.0, 2.75]),
        "slow": itertools.repeat(3.0),
    }
    order = []

    def runs(batch: Any, num_samples: int) -> Any:
        way, positions = batch
        order.append(way)
        assert len(positions) == num_samples
        return Timed(TrialResult("ran", (next(times[way]),)))

    units = {
        "first": [SampledUnit([0, 1], 2.0), SampledUnit([2], 1.0)],
        "second": [SampledUnit([0, 1, 2], 3.0)],
        "slow": [SampledUnit([0, 1, 2], 3.0)],
    }
    loads = {way: functools.partial(lambda way, positions: (way, list(positions)), way) for way in units}
    seconds, failed = seconds_of_steps(runs, loads, units)
    assert order == ["first", "first", "second", "slow", *["first", "first", "second"] * 2]
    assert seconds == {"first": 2.0 * 3.0 + 3.0, "second": 7.5, "slow": 9.0}
    assert not failed
    order.clear()
    times |= {"first": itertools.repeat(1.0), "second": itertools.repeat(9.0)}
    seconds_of_steps(runs, loads, units, drops_slow=False)  # as on ranks that wait for each other
    assert order == ["first", "first", "second", "slow"] * 3
