"""`tune` times whole steps at many sizes, and recommends the smallest of the fastest."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core.geometry import smallest_of_the_fastest
from anybatch.diagnostics import TuneReport, tune
from anybatch.diagnostics.step_times import Estimate
from anybatch.diagnostics.tune import MAX_UNCLEAR, SizeResult, default_sizes, longer_than_fastest
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import BatchSizeError
from tests.events.recorded_run import Clock
from tests.raising import raises

NUM_SAMPLES = 48


class Model(nn.Module):
    """A model on a fake device that slows down above 12 samples and runs out of memory above `fits`."""

    def __init__(self, clock: Clock, fits: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.clock = clock
        self.fits = fits
        self.sizes: list[int] = []
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(len(x))
        self.clock.seconds += 0.05 + 0.01 * len(x) + 0.02 * max(0, len(x) - 12)
        if len(x) > self.fits:
            message = "no memory for that many samples"
            raise torch.OutOfMemoryError(message)
        found: torch.Tensor = self.layers(x)
        return found


def spec(model: nn.Module, optimizer: Any, **options: Any) -> TrainSpec:
    """Return the spec of a training with the mean square as its loss."""
    loss = ab.mean_over_samples(lambda net, batch: net(batch).square().mean())
    return TrainSpec(model=model, optimizer=optimizer, loss=loss, **options)


def tuned(clock: Clock, model: nn.Module, **options: Any) -> TuneReport:
    """Tune; the optimizer's update takes 0.1 seconds."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            clock.seconds += 0.1
            super().step(closure)

    return tune(
        spec(model, lambda named: Slow(named, lr=1e-6)),
        ab.batches(list(torch.ones(NUM_SAMPLES, 5)), effective_batch_size=NUM_SAMPLES),
        clock=clock,
        world=ab.World(),
        **{"queued": lambda: 0.0} | options,
    )


def test_whole_steps() -> None:
    """A rate is samples per second of a whole step: all micro-batches, with the smaller last one, and the update."""
    clock = Clock()
    report = tuned(clock, Model(clock), micro_batch_sizes=[48, 12, 20])

    by_hand = {
        12: 4 * (0.05 + 0.12) + 0.1,
        20: 2 * (0.05 + 0.2 + 0.16) + (0.05 + 0.08) + 0.1,
        48: 0.05 + 0.48 + 0.72 + 0.1,
    }
    assert report.rates == pytest.approx({size: NUM_SAMPLES / seconds for size, seconds in by_hand.items()})
    assert [one.num_micro_batches for one in report.sizes] == [4, 3, 1]
    assert report.best == report.recommended == 12


def test_sizes_alternate() -> None:
    """Each size warms up and is timed twice, largest first; later rounds are for close sizes, in alternating order.

    Rounds end after eight if the fastest size is clear. One round always runs, and no other starts after the time
    limit; one round of two close sizes gives no recommendation.
    """
    clock = Clock()
    model = Model(clock)
    tuned(clock, model, micro_batch_sizes=[8, 12, 48], max_seconds=1000.0)

    eight, twelve, whole = [8] * (2 + 6), [12] * (2 + 4), [48] * 2
    assert model.sizes == [
        *(*whole, *twelve, *eight),
        *(*eight, *twelve, *whole),
        *(*twelve, *eight, *eight, *twelve) * 3,
        *([8] * 2 + [12] * 2 + [48]),  # memory
    ]

    model.sizes.clear()
    report = tuned(clock, model, micro_batch_sizes=[24, 48], max_seconds=1.0)
    assert len(model.sizes) == (1 + 1) + (2 + 2) + (2 + 1)
    assert (report.recommended, report.at_most) == (None, math.inf)


def test_one_slow_round_does_not_decide() -> None:
    """A size that was slow once, as on a busy machine, is run again and found the fastest."""
    clock = Clock()

    class Disturbed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.seconds += 10.0 * (len(self.sizes) == 10)  # the first timed step of size 12
            return super().forward(x)

    report = tuned(clock, Disturbed(clock), micro_batch_sizes=[8, 12, 24], max_seconds=1000.0)
    assert report.best == 12
    assert list(report.rates) == [8, 12, 24]


def test_one_fast_round_does_not_decide() -> None:
    """A size that was fast once does not end the measurement of a size that is close to it in another round."""
    clock = Clock()

    class Boosted(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock.seconds -= 0.05 * (len(x) == 12 and len(self.sizes) in range(2, 8))  # its first timed step
            return super().forward(x)

    report = tuned(clock, Boosted(clock), micro_batch_sizes=[8, 12], max_seconds=1000.0)
    assert report.recommended == 12
    assert all(row.longer is not None and math.isfinite(row.longer.high) for row in report.sizes)


class Disturbances(Clock):
    """A clock that adds random delays: each reading is later by up to `scale` seconds, and sometimes by ten times."""

    def __init__(self, seed: int, scale: float) -> None:
        super().__init__()
        self.draw, self.scale = random.Random(seed), scale

    def __call__(self) -> float:
        """Return a disturbed time."""
        self.seconds += self.draw.random() * self.scale * (10.0 if self.draw.random() < 0.1 else 1.0)
        return super().__call__()


def rounds_of(seconds: dict[int, float], seed: int, scale: float, *, number: int = 14) -> dict[int, list[float]]:
    """Return rounds of step times with log-normal noise, and a machine that changes its speed between rounds."""
    draw = random.Random(seed)
    speeds = [draw.choice((1.0, 2.0)) for _ in range(number)]
    return {size: [each * speed * math.exp(draw.gauss(0, scale)) for speed in speeds] for size, each in seconds.items()}


def test_noise_above_the_effect_gives_no_recommendation() -> None:
    """In 50 draws with much noise, no size is recommended that is over 10% slower; with little noise, one always is."""
    seconds = {8: 1.2, 16: 1.0, 32: 1.02}
    decided = {0.5: 0, 0.02: 0}
    for scale, seed in itertools.product(decided, range(50)):
        longer, at_most = longer_than_fastest(rounds_of(seconds, seed, scale), list(seconds))
        assert all(found.value >= 1.0 for found in longer.values())
        if at_most <= MAX_UNCLEAR:
            decided[scale] += 1
            assert smallest_of_the_fastest({size: found.value for size, found in longer.items()}) in (16, 32)
    assert decided[0.02] == 50
    assert decided[0.5] < 5


def test_a_busy_machine_gives_no_recommendation() -> None:
    """A report of steps that waited for a core, or of disturbed times, marks no size and prints no share above 100%."""
    clock = Clock()
    report = tuned(clock, Model(clock), micro_batch_sizes=[12, 48], queued=lambda: clock.seconds / 3)
    assert report.queued_share == pytest.approx(1 / 3)
    assert report.recommended is None
    assert "<-" not in str(report)

    noisy = Disturbances(0, 3.0)
    report = tuned(noisy, Model(noisy), micro_batch_sizes=[12, 16, 20])
    assert report.recommended is None
    assert max(report.rates.values()) == report.rates[report.best]


def test_sizes_below_a_slow_one_are_not_tried() -> None:
    """Below a size whose step takes twice the shortest time, sizes are not tried, and the table notes it."""
    clock = Clock()
    model = Model(clock)
    report = tuned(clock, model, micro_batch_sizes=[1, 2, 12])

    assert list(report.rates) == [2, 12]
    assert report.rates[2] == pytest.approx(48 / (24 * 0.07 + 0.1))
    assert 1 not in model.sizes
    assert "not measured" in str(report).splitlines()[3]


@pytest.mark.slow
def test_sizes_that_do_not_fit() -> None:
    """Sizes from the first that runs out of memory on are listed without figures."""
    clock = Clock()
    report = tuned(clock, Model(clock, fits=23))

    assert [one.size for one in report.sizes] == [2, 3, 6, 12, 24, 48]
    assert list(report.rates) == [2, 3, 6, 12]
    assert [one.peak_bytes is None for one in report.sizes] == [False] * 4 + [True] * 2
    assert str(report).count("does not fit") == 2
    with raises(BatchSizeError, "does_not_fit"):
        tuned(clock, Model(clock, fits=1))


def test_memory_matches_the_tensors() -> None:
    """The peak includes weights, gradients and saved activations, and grows linearly with the samples."""
    clock = Clock()
    report = tuned(clock, Model(clock), micro_batch_sizes=[6, 12, 24])

    numbers = 5 * 64 + 64 + 64 + 1
    small, middle, large = (one.peak_bytes or 0 for one in report.sizes)
    assert small >= 4 * (2 * numbers + 6 * 64)
    assert large - middle == pytest.approx(2 * (middle - small), abs=64)  # the losses of micro-batches are kept too
    assert middle - small >= 4 * 6 * 64


def test_sizes_out_of_range() -> None:
    """A size that is not possible for the batch raises with both numbers."""
    for size in (0, 49):
        clock = Clock()
        with raises(BatchSizeError, "size_out_of_range"):
            tuned(clock, Model(clock), micro_batch_sizes=[size])


@pytest.mark.parametrize(
    ("num_samples", "sizes"), [(256, [2, 4, 8, 16, 32, 64, 128, 256]), (29, [2, 4, 8, 15, 29]), (1, [1]), (2, [2])]
)
def test_default_sizes(num_samples: int, sizes: list[int]) -> None:
    """Default sizes split the batch in 1, 2, 4, ... nearly equal parts, down to two samples."""
    assert default_sizes(num_samples) == sizes


@pytest.mark.slow
def test_training_steps_are_timed() -> None:
    """Tuning runs the steps of the full `TrainSpec`, including clipping, on the model."""
    model = nn.Linear(5, 3)
    before = model.weight.detach().clone()
    tune(
        spec(model, lambda named: torch.optim.SGD(named, lr=1.0), clip=1e-12),
        ab.batches(list(torch.ones(NUM_SAMPLES, 5)), effective_batch_size=NUM_SAMPLES),
        world=ab.World(),
    )

    torch.testing.assert_close(model.weight, before)


def test_batch_norm_recommends_the_full_batch() -> None:
    """With BatchNorm the full batch is recommended, with the reason."""
    sizes = [
        SizeResult(
            size=size,
            num_micro_batches=64 // size,
            samples_per_second=rate,
            longer=Estimate(100 / rate, 1.0, 1.2),
            peak_bytes=size,
        )
        for size, rate in ((8, 90.0), (16, 98.0), (32, 100.0))
    ]
    report = TuneReport(num_samples=64, device="a device", sizes=tuple(sizes), num_batch_norms=2)
    assert report.recommended == 32
    assert "2 BatchNorm layers normalise within each micro-batch" in str(report)
