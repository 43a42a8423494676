"""The spike watch warns, lowers the rate or rolls back; a healthy run is unchanged."""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.records import DiagnosisRecord, Record
from anybatch.core.spikes import SpikeRule, SpikeWatch
from anybatch.errors import AnyBatchWarning, NonFiniteError, UserError
from tests.engine.cases import Batch, classify
from tests.raising import warns
from tests.ranks_fixture import Ranks

RULE = SpikeRule(window=16, least=10)
BAD = 30
"""The step with the bad batch."""


class Diagnoses:
    """Keeps the code and step of diagnoses."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int | None]] = []

    def observe(self, record: Record, /) -> None:
        """Keep a diagnosis."""
        if isinstance(record, DiagnosisRecord):
            self.found.append((record.code, record.step))


def batches(num_steps: int, *, bad: float | None = None) -> Iterator[Batch]:
    """Yield batches of 8 vectors; the loss of step 30 is multiplied by `bad`."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    for step in range(num_steps):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = (x @ weights).argmax(1)
        factor = bad if bad is not None and step == BAD else 1.0
        yield {"x": x, "y": y, "factor": torch.full((8,), factor, dtype=torch.float64)}


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy, times the factor of the batch."""
    return classify(model, batch) * batch["factor"].mean()


def engine_of(spikes: Any = None, *, optimizer: Any = torch.optim.AdamW, **options: Any) -> ab.Engine:
    """Return an engine over a small network with a schedule."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    return ab.Engine(
        model,
        lambda named: optimizer([parameter for _, parameter in named], lr=0.01),
        ab.mean_over_samples(loss_of),
        micro_batch_size=8,
        check_loss=False,
        norms="keep",
        scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 10, gamma=0.9),
        spikes=spikes,
        **options,
    )


def state_of(engine: ab.Engine) -> dict[str, torch.Tensor]:
    """Return copies of weights, buffers and optimizer state."""
    modules = engine.model
    assert isinstance(modules, nn.Module)
    state = {name: value.clone() for name, value in modules.state_dict().items()}
    for number, values in engine.optimizer.state_dict()["state"].items():
        state |= {f"{number} {name}": torch.as_tensor(value).clone() for name, value in values.items()}
    return state


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two states are bitwise equal."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_roll_back_is_bit_for_bit() -> None:
    """After a spike, weights, buffers and optimizer return bitwise to an earlier step; data and schedule continue."""
    watch = SpikeWatch(action="roll_back", rule=RULE, keep_every=4, warm_up_steps=4)
    states, told = {}, Diagnoses()
    with engine_of(watch, observer=told) as engine:
        for step, batch in enumerate(batches(BAD, bad=1e6)):
            engine.step(batch)
            states[step] = state_of(engine)
        with warns("spike"):
            engine.step(list(batches(BAD + 1, bad=1e6))[-1])
        states[BAD] = state_of(engine)
        assert [code for code, step in told.found if step == BAD] == ["spike", "rolled_back"]
        back = [step for step in range(BAD) if same(states[step], states[BAD])]
        assert len(back) == 1
        assert BAD - 4 - 4 - 4 <= back[0] <= BAD - 1 - 4
        # The step count and the schedule continue.
        assert engine.num_steps == BAD + 1
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**3)


def test_a_lowered_rate_scales_the_schedule() -> None:
    """After a spike, updates equal plain PyTorch with half the scheduled rates."""
    watch = SpikeWatch(action="lower", rule=RULE)
    with engine_of(watch, optimizer=torch.optim.SGD) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        model = engine.model
        assert isinstance(model, nn.Module)
        for step, batch in enumerate(batches(BAD + 15, bad=1e6)):
            plain = copy.deepcopy(model)
            report = engine.step(batch)
            rate = (0.5 if step > BAD else 1.0) * 0.01 * 0.9 ** (step // 10)
            assert report.learning_rates == pytest.approx((rate,), rel=1e-12)
            gradients = torch.autograd.grad(loss_of(plain, batch), list(plain.parameters()))
            for before, gradient, after in zip(plain.parameters(), gradients, model.parameters(), strict=True):
                assert torch.allclose(before - rate * gradient, after, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_rate_rises_again_after_a_roll_back() -> None:
    """After a roll-back the rate rises to its full value, and after a second spike soon after it to half."""
    watch = SpikeWatch(action="roll_back", rule=RULE, keep_every=4, warm_up_steps=4)
    with engine_of(watch) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        rates = [
            engine.step({**batch, "factor": batch["factor"] * (1e6 if step in (BAD, BAD + 20) else 1.0)})
            for step, batch in enumerate(batches(BAD + 28))
        ]
    factors = [report.learning_rates[0] / (0.01 * 0.9 ** (step // 10)) for step, report in enumerate(rates)]
    rise = (0.2, 0.4, 0.6, 0.8, 1.0, 1.0)
    assert factors[BAD] == pytest.approx(1.0)
    assert factors[BAD + 1 : BAD + 7] == pytest.approx(rise)
    assert factors[BAD + 21 : BAD + 27] == pytest.approx([0.5 * part for part in rise])


@pytest.mark.slow
def test_non_finite_steps_are_skipped_with_rollback() -> None:
    """With rollback, a NaN step is skipped and the run continues; any other watch raises."""
    watch = SpikeWatch(action="roll_back", rule=RULE, keep_every=4)
    told = Diagnoses()
    with engine_of(watch, observer=told) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        reports = [engine.step(batch) for batch in batches(50, bad=float("nan"))]
    assert reports[BAD].skipped
    assert not any(report.skipped for report in reports[BAD + 1 :])
    assert ("rolled_back", BAD) in told.found
    assert all(value.isfinite().all() for value in state_of(engine).values())
    for other in (None, "warn", "lower"):
        with engine_of(other) as plain, pytest.raises(NonFiniteError):
            list(map(plain.step, batches(BAD + 1, bad=float("nan"))))


@pytest.mark.slow
def test_a_watch_that_finds_nothing_changes_nothing() -> None:
    """A healthy run is bitwise the same with any watch, and "warn" does not change a run with a spike either."""

    def final(spikes: Any, bad: float | None) -> dict[str, torch.Tensor]:
        with engine_of(spikes) as engine, warnings.catch_warnings():
            warnings.simplefilter("ignore", AnyBatchWarning)
            for batch in batches(40, bad=bad):
                engine.step(batch)
            return state_of(engine)

    plain = final(None, None)
    assert same(final(SpikeWatch(action="roll_back", rule=RULE), None), plain)
    assert same(final(SpikeWatch(action="warn", rule=RULE), 1e6), final(None, 1e6))


def test_a_resumed_run_keeps_the_lower_rate(tmp_path: Path) -> None:
    """The rate factor is saved in the checkpoint; an engine without a watch warns that it drops the factor."""
    watch = SpikeWatch(action="lower", rule=RULE)
    with engine_of(watch) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        for batch in batches(BAD + 1, bad=1e6):
            engine.step(batch)
        engine.save(tmp_path)
        (after, *_) = (engine.step(batch).learning_rates for batch in batches(1))
    with engine_of(watch) as resumed:
        resumed.load(tmp_path)
        assert resumed.step(next(batches(1))).learning_rates == after
    with engine_of() as plain, warns("rate_not_lowered"):
        plain.load(tmp_path)


def test_a_watch_gives_up_in_the_end() -> None:
    """After `max_actions` the watch reports that it gives up, and then only warns."""
    watch = SpikeWatch(action="lower", rule=RULE, max_actions=2, lower_to=0.1)
    told = Diagnoses()
    with engine_of(watch, observer=told) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        reports = [
            engine.step({**batch, "factor": batch["factor"] * (1e6 if step in (30, 45, 60, 75) else 1.0)})
            for step, batch in enumerate(batches(90))
        ]
    codes = [code for code, _ in told.found if code in ("rate_lowered", "spike_watch_gave_up")]
    assert codes == ["rate_lowered", "rate_lowered", "spike_watch_gave_up"]
    assert reports[-1].learning_rates[0] == pytest.approx(0.01 * 0.9**8 * 0.01)


def test_invalid_watches_are_refused() -> None:
    """An unknown action and a factor that does not lower the rate are refused."""
    with pytest.raises(UserError):
        engine_of("stop")
    with pytest.raises(UserError):
        SpikeWatch(lower_to=2.0)


def run_on_ranks(strategy: str) -> tuple[list[tuple[str, int | None]], dict[str, torch.Tensor]]:
    """Run with a bad batch on every rank; return the diagnoses and the final weights."""
    watch = SpikeWatch(action="roll_back", rule=RULE, keep_every=4)
    told = Diagnoses()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    loss = ab.mean_over_samples(loss_of)
    engine = ab.Engine(
        model,
        lambda named: torch.optim.AdamW([parameter for _, parameter in named], lr=0.01),
        loss,
        micro_batch_size=4,
        strategy=strategy,
        spikes=watch,
        observer=told,
    )
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        rank = engine.world.rank
        for batch in batches(50, bad=1e6):
            engine.step({name: value[4 * rank : 4 * rank + 4] for name, value in batch.items()})
        state = engine.model.state_dict() if isinstance(engine.model, nn.Module) else {}
        full = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state.items()}
    return told.found, full


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all_reduce", "fsdp"])
def test_ranks_roll_back_together(strategy: str, two_ranks: Ranks) -> None:
    """Two ranks report and roll back in the same step, and end with the same weights, also sharded ones."""
    (told, weights), (others_told, others) = two_ranks.run(run_on_ranks, strategy)
    assert [code for code, step in told if step == BAD] == ["spike", "rolled_back"]
    assert others_told == told
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert all(value.isfinite().all() for value in weights.values())


SGD, MOMENTUM = torch.optim.SGD, {"momentum": 0.9}
DIVERGENCES = [(SGD, 3.0, {}), (SGD, 1.5, MOMENTUM), (torch.optim.AdamW, 3.0, {}), (torch.optim.RMSprop, 1.0, {})]
HEALTHY = [(SGD, 0.1, {}), (SGD, 0.03, MOMENTUM), (torch.optim.AdamW, 3e-3, {}), (torch.optim.RMSprop, 1e-3, {})]


@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(
    ("made", "diverges"), [*((made, True) for made in DIVERGENCES), *((made, False) for made in HEALTHY)]
)
def test_real_divergence_in_the_first_steps(
    made: tuple[Any, float, dict[str, float]], diverges: bool, width: int
) -> None:
    """Eight trainings with a rate that is too high are reported within 30 steps; eight with a sensible rate never."""
    optimizer, rate, options = made
    torch.manual_seed(0)
    model, target = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 4)), torch.randn(16, 4) / 4
    loss = ab.mean_over_samples(lambda net, batch: (net(batch["x"]) - batch["y"]).square().mean())
    told = Diagnoses()
    engine = ab.Engine(
        model,
        optimizer(model.parameters(), lr=rate, **options),
        loss,
        micro_batch_size=16,
        spikes="warn",
        check_loss=False,
        observer=told,
    )
    with engine, warnings.catch_warnings():
        warnings.simplefilter("ignore", AnyBatchWarning)
        for _ in range(30):
            x = torch.randn(16, 16)
            with contextlib.suppress(NonFiniteError):
                engine.step({"x": x, "y": x @ target})
    assert bool(told.found) == diverges
