"""Speed and memory by micro-batch size: measures steps at many sizes, and data loading."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import NEAR_BEST, ceil_div, smallest_of_the_fastest
from anybatch.core.splitting import Cut
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import BatchSizeError, MemoryExhaustedError
from anybatch.memory.counted import Counted, counting_text
from anybatch.memory.device_memory import device_name
from anybatch.memory.ledger import MemoryLedger
from anybatch.norms.layers import batch_norms
from anybatch.parallel.world import World

_GAIN_WORTH_SAYING = 0.03
_SMALL_LOSS = 0.05
"""The part of a step that loading may take before it is worth a worker."""
_MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """Whole steps at one micro-batch size."""

    size: int
    num_micro_batches: int  # in a step
    samples_per_second: float | None  # of whole steps, with the update; None if memory ran out
    peak_bytes: int | None  # of a step; None if memory ran out or is not reported
    is_estimated: bool = False  # from its first micro-batches, without whole steps
    of_the_fastest: tuple[float, float] | None = None  # quartiles relative to the fastest; None if measured once


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingResult:
    """How fast samples are loaded, with nothing else to do."""

    num_workers: int
    samples_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Samples per second and memory by micro-batch size, and how fast data is loaded. `print(report)` shows it.

    Attributes:
        num_samples: samples of a step.
        device: where it was measured.
        sizes: one result for each size, rising.
        loading: one result for each number of workers, rising; empty if that was not asked for.
        num_batch_norms: layers that normalise within each micro-batch, so that a cut batch is trained otherwise.
        counted: how memory is counted.
    """

    num_samples: int
    device: str
    sizes: tuple[SizeResult, ...]
    loading: tuple[LoadingResult, ...] = ()
    num_batch_norms: int = 0
    counted: Counted = "in tensors"

    @property
    def rates(self) -> dict[int, float]:
        """Return size to samples per second, of the sizes that fit."""
        return {one.size: one.samples_per_second for one in self.sizes if one.samples_per_second is not None}

    @property
    def best(self) -> int:
        """The fastest size whose whole steps were timed."""
        return max(self._measured, key=lambda size: self.rates[size])

    @property
    def recommended(self) -> int:
        """The smallest size whose steps take at most 3% longer than the fastest: it needs the least memory.

        If a split changes the training, the whole batch if it fits, else the largest size that does.
        """
        if self.num_batch_norms:
            return max(self.rates)
        return smallest_of_the_fastest({size: self.num_samples / self.rates[size] for size in self._measured})

    @property
    def _measured(self) -> list[int]:
        return [one.size for one in self.sizes if one.samples_per_second is not None and not one.is_estimated]

    @property
    def rates_with_loading(self) -> dict[int, float]:
        """Return number of workers to the samples per second that can be trained, at the recommended size.

        The training process loads between steps; workers load meanwhile, each on its own core.
        """
        rate = self.rates[self.recommended]
        return {
            one.num_workers: min(rate, one.samples_per_second)
            if one.num_workers
            # In one process the times of training and of loading add up, so the rates combine harmonically.
            else rate * one.samples_per_second / (rate + one.samples_per_second)
            for one in self.loading
        }

    @property
    def loading_verdict(self) -> str:
        """How loading limits training at the recommended size, in a sentence; empty if it was not measured."""
        if not self.loading:
            return ""
        rate, found = self.rates[self.recommended], self.rates_with_loading
        best = smallest_of_the_fastest({number: 1.0 / value for number, value in found.items()})
        here = f"{1.0 - found[0] / rate:.0%} of training time with num_workers=0" if 0 in found else ""
        if found[best] < (1.0 - _SMALL_LOSS) * rate:
            lost = f"; loading takes {here}" if here else ""
            return (
                f"data loading is the bottleneck: of {rate:,.0f} samples/s at most {found[best]:,.0f} are trained, "
                f"with num_workers={best}{lost}."
            )
        if not best:
            return f"data loading keeps up: it takes {here}."
        without = f"; loading takes {here}" if here else ""
        cores = "a core" if best == 1 else f"{best} cores"
        return f"data loading keeps up with num_workers={best} and {cores} to spare{without}."

    def __str__(self) -> str:
        """Return the tables and the verdict."""
        lines = [f"{self.num_samples} samples per step, {self.device}", "", *self._curve()]
        if self.loading:
            lines += ["", "  workers  samples/s loaded"]
            lines += [f"  {one.num_workers:>7}  {one.samples_per_second:>16,.0f}" for one in self.loading]
            lines += ["", self.loading_verdict]
        return "\n".join(lines)

    def _curve(self) -> list[str]:
        rates, best, recommended = self.rates, self.best, self.recommended
        lines = [f"  micro-batch  per step  samples/s    of the best{self.counted:>14}"]
        for one in self.sizes:
            rate = rates.get(one.size)
            if rate is None:
                speed = f"{'does not fit':>24}"
            else:
                low, high = one.of_the_fastest or (0.0, 0.0)
                between = f" ({low:.0%}-{high:.0%})" if round(low, 2) != round(high, 2) else ""
                about = "~" if one.is_estimated else ""
                speed = f"{about + format(rate, ',.0f'):>9}  {f'{rate / rates[best]:.0%}{between}':>13}"
            memory = "" if one.peak_bytes is None else f"{one.peak_bytes / _MEBIBYTE:>10,.1f} MiB"
            marks = [word for word, size in (("fastest", best), ("recommended", recommended)) if size == one.size]
            note = f"  <- {', '.join(marks)}" if marks else ""
            lines.append(f"  {one.size:>11}  {one.num_micro_batches:>8}  {speed}{memory:>14}{note}".rstrip())
        if any(one.is_estimated for one in self.sizes):
            lines += ["", "~ estimated from one and two micro-batches: too slow for whole steps."]
        return [*lines, "", counting_text(self.counted), self._advice()]

    def _advice(self) -> str:
        size = f"recommended: micro_batch_size={self.recommended}"
        if not self.num_batch_norms:
            return f"{size}, the smallest within {NEAR_BEST - 1.0:.0%} of the fastest."
        layers = f"{self.num_batch_norms} BatchNorm layer{'s' * (self.num_batch_norms > 1)}"
        which = "the whole batch" if self.recommended == self.num_samples else "the largest that fits"
        gain = self.rates[self.best] / self.rates[self.recommended] - 1.0
        faster = f" micro_batch_size={self.best} is {gain:.0%} faster, but trains differently."
        faster = faster if gain >= _GAIN_WORTH_SAYING else ""
        return (
            f"{size}, {which}: {layers} normalise{'s' * (self.num_batch_norms == 1)} within each micro-batch, so every "
            f"size trains differently (norms='exact' makes splits equal).{faster}"
        )


Measured = TypeVar("Measured")
NUM_ROUNDS = 6
"""The first tries all sizes, the others only candidates for the fastest."""
_MOST_OF_A_CANDIDATE = 1.25
"""Factor of the shortest step in two rounds above which a size is dropped."""
_TIMED_SECONDS, _MOST_STEPS = 0.2, 20
"""Limits of a size in a round: seconds, and number of steps."""
_STEPS_OF_A_SUBSET = 3
_MOST_TIMES_SHORTEST = 2.0
"""Factor of the shortest estimated step above which a size is not measured."""
LOADED_STEPS = 4
"""Effective batches loaded for each number of workers, after a first one."""


def tune(
    train: TrainSpec,
    data: Callable[[int], Iterable[EffectiveBatch]],
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] = (),
    most_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
    world: World | None = None,
) -> TuneReport:
    """Measure interleaved steps at many micro-batch sizes, and the speed of data loading.

    Equivalent to this loop, after a shorter warm-up step of each engine:

    ```python
    for turn in range(6):
        for size in all_sizes if turn == 0 else those_near_the_fastest:
            seconds[size].append(timed(engine_with(size).step, batch))
    ```

    Sizes whose steps of one and two micro-batches predict more than twice the shortest time are not run completely.
    The result is the median of a size's times relative to the fastest size in the same round, so that occasional load
    on the machine does not matter. The batch is loaded beforehand; a step is forwards, backwards and update. Memory is
    the peak of tensors, with weights, gradients and optimizer state: the allocator's on CUDA, on a CPU from a separate
    untimed run of two micro-batches.

    Args:
        train: a `TrainSpec` with a new model, because it is trained for some steps, without the scheduler and the
            loss check.
        data: function num_workers -> effective batches, such as `ab.batches`; the first one is trained on.
        micro_batch_sizes: sizes to try; None: the batch in 1, 2, 4, ... parts.
        num_workers: numbers of loading processes to try; empty: do not measure loading.
        most_seconds: start no round after this many seconds; there is at least one.
        clock: monotonic time in seconds.
        world: the rank to measure on; None reads the environment.

    Raises:
        BatchSizeError: a size is below 1 or above the batch's, or not even the smallest one fits.
    """
    world = World.from_environment() if world is None else world
    batch = next(iter(data(0)))
    num_samples = len(batch.sample_ids)
    sizes = _checked(default_sizes(num_samples) if micro_batch_sizes is None else micro_batch_sizes, num_samples)
    # BatchNorm layers that make a split batch train differently; 0 if a policy was chosen.
    modules = [train.model] if isinstance(train.model, torch.nn.Module) else list(train.model.values())
    layers = [layer for module in modules for layer in batch_norms(module).values() if layer.training]
    num_batch_norms = len(layers) if train.norms is None else 0
    train = spec_for_repeated_steps(train)

    def engine(size: int) -> Engine:
        return Engine.from_spec(train, Hardware(micro_batch_size=size, world=world))

    timer = _StepTimer(engine, batch, world.device, clock)
    times = timer.seconds(sizes, most_seconds)
    if not times:
        message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {world.device}. Try smaller ones."
        raise BatchSizeError(message, code="does_not_fit", micro_batch_size=sizes[0])
    # Counting tensors slows a step down, so on a CPU memory is measured in a separate run.
    peaks = timer.peaks or {size: _peak_bytes(modules, engine, batch, size) for size in times}
    ratios = _relative_times(times, timer.estimated)
    fastest = min(set(ratios) - timer.estimated, key=lambda size: median(ratios[size]))
    shortest = median(times[fastest])
    report = TuneReport(
        num_samples=num_samples,
        device=device_name(world.device),
        sizes=tuple(
            SizeResult(
                size=size,
                num_micro_batches=ceil_div(num_samples, size),
                samples_per_second=num_samples / (shortest * median(ratios[size])) if size in ratios else None,
                peak_bytes=peaks.get(size),
                is_estimated=size in timer.estimated,
                of_the_fastest=_quartiles_of_rates(ratios.get(size, ())),
            )
            for size in sizes
        ),
        num_batch_norms=num_batch_norms,
        counted="allocated" if timer.peaks else "in tensors",
    )
    cut = Cut(micro_batch_size=report.recommended)
    loading = [
        LoadingResult(num_workers=number, samples_per_second=_loaded_per_second(data(number), cut, clock))
        for number in sorted(set(num_workers))
    ]
    return dataclasses.replace(report, loading=tuple(loading))


def default_sizes(num_samples: int) -> Sequence[int]:
    """Return sizes that split a step into 1, 2, 4, ... nearly equal parts, rising, from 2 samples."""
    sizes = {num_samples}
    parts = 2
    while (size := -(-num_samples // parts)) >= min(2, num_samples) and parts <= num_samples:
        sizes.add(size)
        parts *= 2
    return sorted(sizes)


class _StepTimer:
    """Makes and times steps at one size after the other."""

    def __init__(
        self, engine: Callable[[int], Engine], batch: EffectiveBatch, device: torch.device, clock: Callable[[], float]
    ) -> None:
        self._engine, self._whole = engine, batch
        self._device, self._clock = device, clock
        self.peaks: dict[int, int] = {}
        self.estimated: set[int] = set()

    def seconds(self, sizes: Sequence[int], most_seconds: float) -> dict[int, list[float]]:
        """Return the times of interleaved steps, round by round, for each size that fits."""
        begun = self._clock()
        estimates = self._estimates(sizes)
        # A size is dropped if its lower estimate exceeds the upper estimate of the fastest.
        limit = _MOST_TIMES_SHORTEST * min((most for _, most in estimates.values()), default=0.0)
        self.estimated = {size for size, (least, _) in estimates.items() if least > limit}
        found: dict[int, list[float]] = {size: [estimates[size][0]] for size in self.estimated}
        turn: Sequence[int] = [size for size in estimates if size not in self.estimated]
        for number in range(NUM_ROUNDS):
            for size in turn:
                taken = self._with_engine(size, partial(self._step, size))
                if taken is None:
                    # A size that does not fit in every round is not recommended, and neither is a larger one.
                    found = {one: times for one, times in found.items() if one < size}
                    break
                found.setdefault(size, []).append(taken)
            if not found or self._clock() - begun > most_seconds:
                break
            # A size is dropped by its shortest step, after two rounds: the machine may have been busy in one.
            limit = _MOST_OF_A_CANDIDATE * min(max(times) for times in found.values())
            near = (one for one in found.keys() - self.estimated if not number or min(found[one]) <= limit)
            # The order is reversed each time, so that a machine that slows down affects all sizes equally.
            turn = sorted(near, reverse=list(turn) == sorted(turn))
            if len(turn) == 1:
                break
        return found

    def _estimates(self, sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Return a lower and an upper estimate of the time of a step, for each size that fits.

        From steps of one and two micro-batches: each further one takes as long as the second, or at most half of a step
        of two with its update.
        """
        found = {}
        for size in sizes:
            number = ceil_div(len(self._whole.sample_ids), size)
            pair = self._with_engine(size, partial(self._one_and_two, size))
            if pair is None:
                break  # larger sizes do not fit either
            one, two = pair
            further = number - 1 if number > 2 else 0  # noqa: PLR2004 (a step is as short)
            found[size] = one + further * max(0.0, two - one), two * max(1.0, number / 2)
        return found

    def _one_and_two(self, size: int, engine: Engine) -> tuple[float, float] | None:
        """Return the time of a step with one micro-batch and with two."""
        batch = _two_micro_batches(self._whole, size)
        twos = self._timed(engine, batch, size, 1)
        # Allocating the optimizer's state hardly matters to a long step; a short one is repeated.
        if twos and twos[0] < _TIMED_SECONDS:
            twos = self._timed(engine, batch, size, _STEPS_OF_A_SUBSET)
        ones = twos
        if twos and len(self._whole.sample_ids) > 2 * size:
            ones = self._timed(engine, BatchSubset(self._whole, range(size)), size, _STEPS_OF_A_SUBSET)
        # Noise only adds to a time, and there are few.
        return (min(ones), min(twos)) if ones and twos else None

    def _step(self, size: int, engine: Engine) -> float | None:
        """Return the seconds of a step of the whole batch, after a short one; None if memory ran out."""
        # The first step allocates the optimizer's state and warms the caches; only the second one is timed.
        if not self._timed(engine, _two_micro_batches(self._whole, size), size, 1):
            return None
        times = self._timed(engine, self._whole, size, _MOST_STEPS)
        return median(times) if times else None

    def _timed(self, engine: Engine, batch: EffectiveBatch, size: int, most: int) -> list[float]:
        """Return the seconds of steps, up to a number and a fifth of a second; none if memory ran out."""
        cached, times = CachedBatch(batch), list[float]()
        list(Placement(Cut(micro_batch_size=size), 1, 0).micro_batches(cached))
        # A step of a small model ends before the machine does anything else.
        while not times or (len(times) < most and sum(times) < _TIMED_SECONDS):
            begun = self._now()
            too_large = engine.step(cached).too_large
            times.append(self._now() - begun)
            if too_large:  # the engine continued with a smaller one
                return []
        return times

    def _with_engine(self, size: int, measure: Callable[[Engine], Measured | None]) -> Measured | None:
        """Return a measurement with a new engine of that size; None if memory ran out."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            with self._engine(size) as engine:
                taken = measure(engine)
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            taken = None
        if self._device.type == "cuda":
            self.peaks[size] = max(self.peaks.get(size, 0), torch.cuda.max_memory_allocated(self._device))
            if taken is None:
                torch.cuda.empty_cache()
        return taken

    def _now(self) -> float:
        # Kernels run asynchronously: without waiting, a step would seem to end when it is only launched.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


def _two_micro_batches(batch: EffectiveBatch, size: int) -> EffectiveBatch:
    """Return a full micro-batch and the smaller last one of a batch, or two full ones: a step that has all shapes."""
    number = len(batch.sample_ids)
    if number <= 2 * size:
        return batch
    rest = number % size or size
    return BatchSubset(batch, [*range(size), *range(number - rest, number)])


def _relative_times(times: Mapping[int, Sequence[float]], estimated: Collection[int] = ()) -> dict[int, list[float]]:
    """Return each size's times relative to the fastest size in the same round; the first round warms up."""
    measured = [size for size in times if size not in estimated]

    def compared(size: int, other: int) -> list[float]:
        pairs = list(zip(times[size], times[other], strict=False))
        return [one / reference for one, reference in (pairs[1:] or pairs)]

    reference = min(measured, key=lambda size: (-len(times[size]), median(times[size])))
    fastest = min(measured, key=lambda size: median(compared(size, reference)))
    return {size: compared(size, fastest) for size in times}


def _quartiles_of_rates(ratios: Sequence[float]) -> tuple[float, float] | None:
    if len(ratios) < 2:  # noqa: PLR2004
        return None
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return 1.0 / high, 1.0 / low


def _peak_bytes(
    modules: Sequence[torch.nn.Module], engine: Callable[[int], Engine], batch: EffectiveBatch, size: int
) -> int:
    """Return the peak memory of tensors in a step, by a ledger; optimizer state is allocated before it."""
    cached = CachedBatch(_two_micro_batches(batch, size))
    # Loaded before the ledger is entered, so that loading is not counted.
    list(Placement(Cut(micro_batch_size=size), 1, 0).micro_batches(cached))
    with MemoryLedger() as ledger:
        for module in modules:
            ledger.hold("weights", module.parameters())
            ledger.hold("buffers", module.buffers())
        with engine(size) as made:
            made.step(cached)
    ledger.forget()
    return ledger.peak_bytes


def _loaded_per_second(data: Iterable[EffectiveBatch], cut: Cut, clock: Callable[[], float]) -> float:
    """Return the loaded samples per second, after the first batch."""
    begun, num_samples = clock(), 0
    run: Any = iter(data)
    try:
        for number, batch in enumerate(run):
            for _ in Placement(cut, 1, 0).micro_batches(batch):
                pass
            # The first batch includes starting the workers, so it is not timed.
            if number == 0:
                begun = clock()
                continue
            num_samples += len(batch.sample_ids)
            if number == LOADED_STEPS:
                break
    finally:
        # Ends the loader's workers, which would disturb the next measurement.
        run.close()
    # A coarse clock may not have advanced.
    return num_samples / max(clock() - begun, 1e-9)


def _checked(sizes: Sequence[int], num_samples: int) -> list[int]:
    for size in sizes:
        if not 1 <= size <= num_samples:
            message = f"micro_batch_size={size} must be from 1 to the {num_samples} samples of the batch."
            raise BatchSizeError(
                message, code="size_out_of_range", effective_batch_size=num_samples, micro_batch_size=size
            )
    return sorted(set(sizes))
