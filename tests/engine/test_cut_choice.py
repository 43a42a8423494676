"""Padded or packed by measurement: the faster one by a simulated clock, the same gradient, told, and kept."""

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
from anybatch.engine.micro_batch_size.cut_choice import SampledUnit, sampled_units, seconds_of_steps
from anybatch.engine.micro_batch_size.trial_run import TrialResult
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
from tests.faults import sees
from tests.ranks_fixture import Ranks

TOLERANCE = 1e-12
FASTER = {"packed": 0.5, "padded": 2.0}
"""How much longer a packed token takes than a padded one, by which layout is then the faster."""


@pytest.fixture
def _timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small steps be worth timing."""
    monkeypatch.setattr(budget_trials, "WORTH_TIMING", 0)


def engine_on(
    device: SimulatedDevice, model: Any = None, tokens: int = 40, declared: Any = DECLARED, **settings: Any
) -> ab.Engine:
    """Return an engine that cuts by length, and whose clock is that of a simulated device."""
    model = device.runs(Language() if model is None else model)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    budget = ab.token_budget(tokens)
    return device.times(ab.Engine(model, optimizer, declared, micro_batch_size=budget, **settings))


def batches_of(**settings: Any) -> Any:
    """Return batches that can be padded and packed."""
    given: dict[str, Any] = {"effective_batch_size": 12, "lengths": LENGTHS, "collate": PaddedOrPacked(), "epochs": 2}
    return ab.batches(Sentences(), **given | settings)


@sees(
    "the slower layout is taken",
    "src/anybatch/engine/micro_batch_size/budget_trials.py",
    "chosen = min(best.values()",
    "chosen = max(best.values()",
)
@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("layout", FASTER)
@pytest.mark.slow
def test_the_faster_layout_is_taken(layout: str, num_workers: int) -> None:
    """It is told with both times, every batch is laid out so, and the gradient is that of the un-split batch."""
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


@sees(
    "a smaller cap is found and not taken",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    "micro_batch_tokens=found.costs.cut_at or sizes.micro_batch_tokens",
    "micro_batch_tokens=sizes.micro_batch_tokens",
)
@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("collate", [Padded(), Packed(), PaddedOrPacked()], ids=["padded", "packed", "either"])
def test_batches_are_cut_smaller_where_a_step_is_faster_then(collate: Any, tmp_path: Any) -> None:
    """Where tokens of more than 50 at once take twice as long, a budget of 80 is cut at 40, in any layout.

    It is told, kept, and the gradient is that of the un-split batch.
    """
    batch = next(iter(batches_of(collate=collate)))
    device = SimulatedDevice(0.9, cached=50)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        engine.gradients(batch)  # finds it
        device.largest = 0
        assert relative_error(engine.gradients(batch), expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert 20 < device.largest <= 40
        assert "; cut at 40, as a step then takes " in engine.decisions["micro_batch_size"]
        engine.step(batch)
        engine.save(tmp_path / "saved")
    device = SimulatedDevice(0.9)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        engine.step(batch)
        assert 20 < device.largest <= 40


@sees(
    "a cap that runs out of memory is the fastest",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    'failed[way] = result.error or "it runs out of memory"',
    "shortest[way][place] = 0.0",
    also=["tests/engine/test_cut_choice.py::test_a_layout_that_fails_has_no_time"],
)
@pytest.mark.usefixtures("_timed")
def test_a_cap_that_does_not_run_is_not_taken() -> None:
    """Where memory has room for fewer tokens than were named, what runs is taken, and the gradient is right."""
    batch = next(iter(batches_of(collate=Padded())))
    device = SimulatedDevice(1.0, room=50)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        assert relative_error(engine.gradients(batch), expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert engine.decisions["micro_batch_size"].endswith("; cut at 40, as larger ones do not run")


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


@sees(
    "workers load ahead in the layout that nobody has chosen",
    "src/anybatch/data/indexed.py",
    "lengths = lengths.in_layout(packed=packed)",
    "pass",
)
@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("layout", FASTER)
def test_workers_load_ahead_in_the_layout_that_was_taken(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the first step they never have to start over: what they load is what is asked for next."""
    starts: list[Prefetcher[Any, Any]] = []
    start = Prefetcher._start  # noqa: SLF001 (where workers start over)

    def counted(self: Prefetcher[Any, Any], keys: Any) -> None:
        starts.append(self)
        start(self, keys)

    monkeypatch.setattr(Prefetcher, "_start", counted)
    with engine_on(SimulatedDevice(FASTER[layout]), check_loss=False) as engine:  # which loads samples once more
        for number, batch in enumerate(batches_of(num_workers=1)):
            engine.step(batch)
            if not number:
                starts.clear()
    assert not starts


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("layout", FASTER)
def test_a_stream_is_laid_out_as_is_faster(layout: str) -> None:
    """Samples that are read before they are cut are collated in the layout that was taken."""

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([Sentences()[index] for index in range(len(LENGTHS))])

    device = SimulatedDevice(FASTER[layout])
    batches = ab.batches(Stream(), effective_batch_size=9, shuffle=False, lengths="input_ids", collate=PaddedOrPacked())
    with engine_on(device) as engine:
        for batch in batches:
            found = engine.gradients(batch)
            assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
            assert device.newest == layout


@sees(
    "each rank takes the layout that is faster on it",
    "src/anybatch/engine/micro_batch_size/budget_trials.py",
    "run_on_all_ranks(lambda: find(generators))[0]",
    "run_on_all_ranks(lambda: find(generators))[self._world.rank]",
)
def test_all_ranks_take_the_layout_of_the_first(two_ranks: Ranks) -> None:
    """Where clocks of ranks say different things, all of them do as rank 0 says, and the gradient is right."""
    for layout, factor in FASTER.items():
        for error, taken in two_ranks.run(either_on_ranks, factor, 1 / factor):
            assert taken.startswith(layout)
            assert error <= TOLERANCE


@sees(
    "a resumed run measures its layout again",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    'self.sizes = dataclasses.replace(self.sizes, packed=saved["packed"])',
    "pass",
)
@sees(
    "a layout that was found holds under another budget",
    "src/anybatch/engine/micro_batch_size/sizes.py",
    'if is_same and saved.get("packed") is not None:',
    'if saved.get("packed") is not None:',
)
@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("layout", FASTER)
def test_a_layout_is_kept_in_checkpoints(tmp_path: Any, layout: str) -> None:
    """A run that goes on keeps its layout, whatever the clock says then; under another budget it is measured anew."""
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
    """What a micro-batch costs comes from a checkpoint without a choice of layouts; the layout is measured."""
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
@pytest.mark.parametrize("layout", FASTER)
def test_a_cost_that_is_named_stays(layout: str) -> None:
    """What a micro-batch costs is not measured then, and the layout is."""
    device = SimulatedDevice(FASTER[layout])
    model = device.runs(Language())
    budget = ab.token_budget(40, fixed_tokens=7)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    with device.times(ab.Engine(model, optimizer, DECLARED, micro_batch_size=budget)) as engine:
        batch = next(iter(batches_of()))
        found = engine.gradients(batch)
        assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
        assert device.newest == layout
        assert "micro_batch_size" not in engine.decisions


class Leaking(Language):
    """Takes packed samples, and lets each see those before it."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        """Look at everything that comes before."""
        if position_ids is not None:
            attention_mask = torch.ones_like(input_ids)
        return super().forward(input_ids, attention_mask, None)


class OnlyPadded(Language):
    """Takes no packed samples."""

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        """Want a mask."""
        if attention_mask is None:
            message = "no mask"
            raise TypeError(message)
        return super().forward(input_ids, attention_mask, position_ids)


@sees(
    "a model that lets packed samples see each other is packed for",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "if error > _DIFFERS *",
    "if error > 1e9 *",
)
@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize(("model", "reason"), [(Leaking, "see each other"), (OnlyPadded, "TypeError: no mask")])
def test_a_model_that_cannot_be_packed_for_is_padded_for(model: Callable[[], Language], reason: str) -> None:
    """However fast packed would be: the gradient is right, and the reason is told."""
    device = SimulatedDevice(0.01)
    with engine_on(device, model()) as engine:
        batch = next(iter(batches_of()))
        found = engine.gradients(batch)
        assert relative_error(found, expected_gradients(batch.sample_ids)) <= TOLERANCE
        engine.step(batch)
        assert device.newest == "padded"
        assert engine.decisions["layout"].startswith("padded, as the model ")
        assert reason in engine.decisions["layout"]


@pytest.mark.usefixtures("_timed")
def test_a_mean_over_samples_is_padded_for() -> None:
    """Packed micro-batches have one row, so a loss that is a mean over rows is not run on them."""

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
    """Numbers that belong to samples are handed out by row, and packed samples share one."""
    device = SimulatedDevice(0.01)
    with engine_on(device, rng="per_sample") as engine:
        engine.step(next(iter(batches_of())))
        assert device.newest == "padded"
        assert "rng='per_sample'" in engine.decisions["layout"]


def test_small_steps_are_padded() -> None:
    """Where a step takes too little to be timed, and in an evaluation before the first step, samples are padded."""
    device = SimulatedDevice(0.01)
    with engine_on(device) as engine:
        engine.evaluate(batches_of(epochs=1))
        assert device.newest == "padded"
        engine.step(next(iter(batches_of())))
        assert engine.decisions["layout"] == "padded, as a step takes too little to be worth timing"


@pytest.mark.usefixtures("_timed")
def test_batches_that_are_kept_have_a_layout_too() -> None:
    """Batches that are loaded once, and parts of batches, give the same gradient in the layout that is taken."""
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
    """Both make the same of a sample, or the choice would change the gradient."""
    with pytest.raises(DataError):
        PaddedOrPacked(**wrong)


LOADS = {
    packed: functools.partial(lambda packed, positions: (packed, list(positions)), packed) for packed in (False, True)
}
"""Load no samples, but what was asked for."""


@sees(
    "a sampled micro-batch stands for itself alone",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "of_all / weight if weight",
    "1.0 if weight",
)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8)
    | st.lists(st.integers(20, 60), min_size=30, max_size=60),
    packed=st.booleans(),
    fixed=st.floats(0, 50),
)
def test_sampled_micro_batches_stand_for_all(lengths: list[int], packed: bool, fixed: float) -> None:
    """At most eight are timed, and by the cost model they take what all take; every one where there are so few."""
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


@sees(
    "micro-batches to time are chosen by weight",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "weighed.sort(key=lambda one: one[:2])",
    "weighed.sort(key=lambda one: one[1])",
)
@pytest.mark.parametrize("packed", [False, True])
def test_sampled_micro_batches_stand_for_long_and_short_samples(packed: bool) -> None:
    """Where a token of a long sample takes half as long again, the sampled ones take what all take, to 3%.

    Short ones and long ones fill micro-batches to the same cap, so that their weights do not tell them apart.
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
    """In the place of trial runs: results that are given."""

    def __init__(self, result: TrialResult) -> None:
        self._result = result

    def run(self, size: int, most: int) -> TrialResult:
        """Return it."""
        del size, most
        return self._result


@sees(
    "the shortest time of each counts",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "unit.factor * median(taken)",
    "unit.factor * min(taken)",
)
@sees(
    "a way that is far slower is run again",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "taken <= _NOT_AGAIN * least or not drops_slow",
    "True",
)
def test_ways_are_timed_in_turns() -> None:
    """Each three times, of which the middle one counts, times what it stands for; what is far slower is run once."""
    times = {
        "first": iter([2.0, 3.0, 4.0, 1.0, 3.0, 5.0]),
        "second": iter([2.5, 2.0, 2.75]),
        "slow": itertools.repeat(3.0),
    }
    order = []

    def runs(make: Any, num_samples: int) -> Any:
        ((way, positions),) = make(num_samples, 1)
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
    seconds_of_steps(runs, loads, units, drops_slow=False)  # as ranks do that wait for each other
    assert order == ["first", "first", "second", "slow"] * 3


@sees(
    "a layout that runs out of memory takes no time",
    "src/anybatch/engine/micro_batch_size/cut_choice.py",
    "            if way not in failed\n",
    "",
)
@pytest.mark.parametrize("result", [TrialResult("out_of_memory"), TrialResult("failed", (), "ValueError: no")])
def test_a_layout_that_fails_has_no_time(result: TrialResult) -> None:
    """It is not taken, and why is told."""

    def runs(make: Any, num_samples: int) -> Any:
        ((packed, _),) = make(num_samples, 1)
        return Timed(result if packed else TrialResult("ran", (1.0,)))

    units = {packed: [SampledUnit([0], 1.0)] for packed in (False, True)}
    seconds, failed = seconds_of_steps(runs, LOADS, units)
    assert seconds == {False: 1.0}
    assert failed == {True: result.error or "it runs out of memory"}
