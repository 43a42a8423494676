"""The engine times padded and packed batches (on a simulated clock) and uses the faster layout."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anybatch as ab
from anybatch.data import Packed, Padded, PaddedOrPacked
from anybatch.engine.micro_batch_size import budget_trials
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
def test_the_faster_layout_is_used(layout: str, num_workers: int) -> None:
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
def test_smaller_cuts_are_used_if_faster(collate: Any, tmp_path: Any) -> None:
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
        assert "; split at 40, because a step then takes " in engine.decisions["micro_batch_size"]
        engine.step(batch)
        engine.save(tmp_path / "saved")
    device = SimulatedDevice(0.9)
    with engine_on(device, tokens=80, check_loss=False) as engine:
        engine.load(tmp_path / "saved")
        engine.step(batch)
        assert 20 < device.largest <= 40


@pytest.mark.usefixtures("_timed")
def test_a_stream_uses_the_faster_layout() -> None:
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


def test_all_ranks_use_the_layout_of_the_first(two_ranks: Ranks) -> None:
    """If clocks differ between ranks, all ranks use the layout of rank 0, and the gradient is right."""
    for layout, factor in FASTER.items():
        for error, taken in two_ranks.run(either_on_ranks, factor, 1 / factor):
            assert taken.startswith(layout)
            assert error <= TOLERANCE


@pytest.mark.usefixtures("_timed")
def test_a_layout_is_kept_in_checkpoints(tmp_path: Any) -> None:
    """A resumed run keeps its layout, even if the clock has changed; with another budget it measures again."""
    with engine_on(SimulatedDevice(FASTER["packed"])) as engine:
        engine.step(next(iter(batches_of())))
        engine.save(tmp_path / "saved")
    for tokens, layout, words in ((40, "packed", "packed, as in the checkpoint"), (60, "padded", "padded, measured: ")):
        device = SimulatedDevice(FASTER["padded"])
        with engine_on(device, tokens=tokens) as engine:
            engine.load(tmp_path / "saved")
            engine.step(next(iter(batches_of())))
            assert device.newest == layout
            assert engine.decisions["layout"].startswith(words)


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
def test_models_that_reject_packed_samples_get_padded_ones(model: Callable[[], Language], reason: str) -> None:
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
def test_a_mean_over_samples_uses_padding() -> None:
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"padded": Padded(longest=4)},
        {"packed": Packed(shift=False)},
    ],
)
def test_layouts_that_differ_in_more_are_refused(wrong: Any) -> None:
    """Padded and packed layouts that treat samples differently raise an error."""
    with pytest.raises(DataError):
        PaddedOrPacked(**wrong)
