"""`tune` times whole steps at many sizes, recommends the smallest of the fastest, and judges data loading."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.diagnostics import TuneReport, tune
from anybatch.diagnostics.figures import draw_tuning
from anybatch.diagnostics.tune import LoadingResult, SizeResult, _relative_times, default_sizes
from anybatch.engine.arguments import TrainSpec
from anybatch.errors import BatchSizeError, UserError
from tests.raising import raises

NUM_SAMPLES = 48
AT_MOST = "data loading is the bottleneck: of 98 samples/s at most"
HERE = "of training time with num_workers=0."


class Clock:
    """A clock that moves only by assignment."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


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
        self.clock.now += 0.05 + 0.01 * len(x) + 0.02 * max(0, len(x) - 12)
        if len(x) > self.fits:
            message = "no memory for that many samples"
            raise torch.OutOfMemoryError(message)
        found: torch.Tensor = self.layers(x)
        return found


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Data that advances the clock for each sample loaded in this process."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += self.seconds
        return torch.full((5,), float(index))


def spec(model: nn.Module, optimizer: Any, **options: Any) -> TrainSpec:
    """Return the spec of a training with the mean square as its loss."""
    loss = ab.mean_over_samples(lambda net, batch: net(batch).square().mean())
    return TrainSpec(model=model, optimizer=optimizer, loss=loss, **options)


def tuned(clock: Clock, model: nn.Module, *, seconds: float = 0.0, **options: Any) -> TuneReport:
    """Tune on data with this loading time; the optimizer's update takes 0.1 seconds."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            clock.now += 0.1
            super().step(closure)

    return tune(
        spec(model, lambda named: Slow(named, lr=1e-6)),
        lambda _: ab.batches(Samples(clock, seconds), effective_batch_size=NUM_SAMPLES, epochs=6),
        clock=clock,
        world=ab.World(),
        **options,
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


def test_sizes_take_turns() -> None:
    """Each size warms up once and is timed in rounds of alternating order, later rounds only for close sizes.

    A size that is 25% slower than the fastest is not run again. Memory is measured over two micro-batches.
    """
    clock = Clock()
    model = Model(clock)
    tuned(clock, model, micro_batch_sizes=[8, 12, 48], most_seconds=1000.0)

    eight, twelve, whole = [8] * (2 + 6), [12] * (2 + 4), [48] * 2
    estimates = [8] * (2 + 1) + [12] * (2 + 1) + [48]
    assert model.sizes == [
        *estimates,
        *(*eight, *twelve, *whole),
        *(*whole, *twelve, *eight),
        *(eight + twelve + twelve + eight) * 2,
        *([8] * 2 + [12] * 2 + [48]),
    ]


def test_one_disturbed_turn_does_not_decide() -> None:
    """A size that was slow in one round, as on a busy machine, is run again and found the fastest."""
    clock = Clock()

    class Disturbed(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # After the estimates of both sizes and the first round of the smaller one.
            clock.now += 1.0 * (14 <= len(self.sizes) < 20)
            return super().forward(x)

    assert tuned(clock, Disturbed(clock), micro_batch_sizes=[8, 12], most_seconds=1000.0).best == 12


def test_what_is_much_slower_is_estimated() -> None:
    """A size whose first micro-batches take more than twice as long is only estimated, and marked."""
    clock = Clock()
    model = Model(clock)
    report = tuned(clock, model, micro_batch_sizes=[2, 12])

    assert [one.is_estimated for one in report.sizes] == [True, False]
    assert report.rates[2] == pytest.approx(48 / (24 * 0.07 + 0.1))  # the time of 24 micro-batches and an update
    assert model.sizes.count(2) == 2 + 2 + 2
    assert "~" in str(report).splitlines()[3]


def test_an_estimate_is_never_recommended() -> None:
    """An estimated size is neither the fastest nor recommended."""
    lucky = SizeResult(size=4, num_micro_batches=16, samples_per_second=500.0, peak_bytes=None, is_estimated=True)
    report = report_of()
    report = dataclasses.replace(report, sizes=(lucky, *report.sizes))
    assert (report.best, report.recommended) == (32, 16)
    assert _relative_times({4: [0.1], 8: [2.0, 2.0], 16: [1.0, 1.0]}, {4})[8] == [2.0]


@pytest.mark.slow
def test_what_does_not_fit() -> None:
    """Sizes from the first that runs out of memory on are listed without figures."""
    clock = Clock()
    report = tuned(clock, Model(clock, fits=23))

    assert [one.size for one in report.sizes] == [2, 3, 6, 12, 24, 48]
    assert list(report.rates) == [2, 3, 6, 12]
    assert [one.peak_bytes is None for one in report.sizes] == [False] * 4 + [True] * 2
    assert str(report).count("does not fit") == 2
    with raises(BatchSizeError, "does_not_fit"):
        tuned(clock, Model(clock, fits=1))


def test_memory_is_what_tensors_hold() -> None:
    """The peak includes weights, gradients and saved activations, and grows linearly with the samples."""
    clock = Clock()
    report = tuned(clock, Model(clock), micro_batch_sizes=[6, 12, 24])

    numbers = 5 * 64 + 64 + 64 + 1
    small, middle, large = (one.peak_bytes or 0 for one in report.sizes)
    assert small >= 4 * (2 * numbers + 6 * 64)
    assert large - middle == pytest.approx(2 * (middle - small), abs=64)  # the losses of micro-batches are kept too
    assert middle - small >= 4 * 6 * 64


def test_loading_in_the_process() -> None:
    """The loading rate is counted from the second batch on, and its share of the step is printed."""
    clock = Clock()
    report = tuned(clock, Model(clock), seconds=0.01, micro_batch_sizes=[12], num_workers=[0])

    assert report.loading[0].num_workers == 0
    assert report.loading[0].samples_per_second == pytest.approx(100.0)
    rate = report.rates[12]
    assert rate == pytest.approx(48 / 0.78)
    assert f"takes {rate / (rate + 100):.0%} of training time with num_workers=0" in report.loading_verdict


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


def report_of(*loaded: tuple[int, float]) -> TuneReport:
    """Return a report of three sizes, and of loading at these rates."""
    rates = ((8, 90.0), (16, 98.0), (32, 100.0), (64, None))
    return TuneReport(
        num_samples=64,
        device="a device",
        sizes=tuple(
            SizeResult(
                size=size,
                num_micro_batches=64 // size,
                samples_per_second=rate,
                peak_bytes=None if rate is None else size * 2**20,
            )
            for size, rate in rates
        ),
        loading=tuple(LoadingResult(num_workers=n, samples_per_second=rate) for n, rate in loaded),
    )


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        ([(0, 4000.0), (1, 3000.0)], f"data loading keeps up: it takes 2% {HERE}"),
        (
            [(0, 98.0), (1, 70.0), (2, 150.0)],
            f"data loading keeps up with num_workers=2 and 2 cores to spare; loading takes 50% {HERE}",
        ),
        ([(1, 97.0), (2, 300.0)], "data loading keeps up with num_workers=1 and a core to spare."),
        (
            [(0, 60.0), (2, 80.0)],
            f"{AT_MOST} 80 are trained, with num_workers=2; loading takes 62% {HERE}",
        ),
        ([(2, 80.0)], "data loading is the bottleneck: of 98 samples/s at most 80 are trained, with num_workers=2."),
        (
            [(0, 300.0), (1, 60.0)],
            f"{AT_MOST} 74 are trained, with num_workers=0; loading takes 25% {HERE}",
        ),
    ],
)
def test_what_is_said_of_loading(loaded: list[tuple[int, float]], said: str) -> None:
    """The verdict names the best number of workers, and whether loading is still the bottleneck."""
    report = report_of(*loaded)

    assert said == report.loading_verdict
    assert report.loading_verdict in str(report)


def test_figure(tmp_path: Path) -> None:
    """Both curves are drawn to a file, also if a size does not fit; an unsupported extension raises."""
    draw_tuning(report_of(), tmp_path / "deep" / "curves.svg")

    drawn = (tmp_path / "deep" / "curves.svg").read_text(encoding="utf-8")
    assert "<svg" in drawn
    with raises(UserError, "picture_format"):
        draw_tuning(report_of(), tmp_path / "curves.gif")


@pytest.mark.slow
def test_what_is_timed_is_what_is_trained() -> None:
    """Tuning runs the steps of the full `TrainSpec`, including clipping, on the model."""
    model = nn.Linear(5, 3)
    before = model.weight.detach().clone()
    tune(
        spec(model, lambda named: torch.optim.SGD(named, lr=1.0), clip=1e-12),
        lambda _: ab.batches(Samples(Clock(), 0.0), effective_batch_size=NUM_SAMPLES, epochs=6),
        world=ab.World(),
    )

    torch.testing.assert_close(model.weight, before)


def test_time_is_bounded() -> None:
    """One round always runs, and no other starts after the time limit."""
    clock = Clock()
    model = Model(clock)
    tuned(clock, model, micro_batch_sizes=[24, 48], most_seconds=1.0)

    assert len(model.sizes) == 2 + 1 + (2 + 2) + (1 + 1) + (2 + 1)


class Counted(torch.utils.data.IterableDataset[torch.Tensor]):
    """A dataset without an index."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randn(24, 5)


@pytest.mark.slow
def test_streams() -> None:
    """An iterable dataset can be tuned like any other data."""
    clock = Clock()
    report = tune(
        spec(Model(clock), lambda named: torch.optim.SGD(named, lr=1e-6)),
        lambda _: ab.batches(Counted(), effective_batch_size=12, shuffle=False),
        num_workers=[0],
        clock=clock,
        world=ab.World(),
    )

    assert list(report.rates) == [2, 3, 6, 12]
    assert len(report.loading) == 1


def test_batch_norm_is_said() -> None:
    """With BatchNorm the full batch is recommended, with the reason."""
    report = dataclasses.replace(report_of(), num_batch_norms=2)
    assert report.recommended == 32
    assert "2 BatchNorm layers normalise within each micro-batch" in str(report)
