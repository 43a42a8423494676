"""Speed and memory by micro-batch size: measures steps at many sizes."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import NEAR_BEST, ceil_div, smallest_of_the_fastest
from anybatch.core.splitting import SplitOptions
from anybatch.core.units import columns, in_bytes
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.diagnostics.step_times import time_after_work
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.errors import BatchSizeError, MemoryExhaustedError
from anybatch.memory.device_memory import Counted, counting_text, device_name
from anybatch.memory.ledger import MemoryLedger
from anybatch.norms.layers import batch_norms
from anybatch.parallel.world import World

_MIN_REPORTED_GAIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """The speed and memory of steps at one micro-batch size."""

    size: int
    num_micro_batches: int  # in a step
    samples_per_second: float | None  # of whole steps, with the update; None if not measured
    peak_bytes: int | None = None  # of a step; None if not measured
    fits: bool = True  # False if memory ran out


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Samples per second and memory by micro-batch size. `print(report)` shows the table.

    Attributes:
        num_samples: samples of a step.
        device: name of the device that was measured.
        sizes: one result for each size, in ascending order.
        num_batch_norms: number of BatchNorm layers that normalise within each micro-batch; with such layers, a split
            changes the training.
        counted: how memory is counted.
    """

    num_samples: int
    device: str
    sizes: tuple[SizeResult, ...]
    num_batch_norms: int = 0
    counted: Counted = "in tensors"

    @property
    def rates(self) -> dict[int, float]:
        """Samples per second by size, for the measured sizes."""
        return {row.size: row.samples_per_second for row in self.sizes if row.samples_per_second is not None}

    @property
    def best(self) -> int:
        """The fastest size."""
        return max(self.rates, key=lambda size: self.rates[size])

    @property
    def recommended(self) -> int:
        """The smallest size whose steps take at most 3% longer than the fastest.

        If a split changes the training: the whole batch if it fits, else the largest size that fits.
        """
        if self.num_batch_norms:
            return max(self.rates)
        return smallest_of_the_fastest({size: self.num_samples / self.rates[size] for size in self.rates})

    def __str__(self) -> str:
        """Return the table and the recommendation."""
        rates, best, recommended = self.rates, self.best, self.recommended
        rows, notes = [["  micro-batch", "per step", "samples/s", "of the best", self.counted]], [""]
        for result in self.sizes:
            rate = rates.get(result.size)
            speed = ["-", "slower" if result.fits else "does not fit"]
            if rate is not None:
                speed = [f"{rate:,.0f}", f"{rate / rates[best]:.0%}"]
            memory = "" if result.peak_bytes is None else in_bytes(result.peak_bytes)
            marks = [word for word, size in (("fastest", best), ("recommended", recommended)) if size == result.size]
            notes.append(f"  <- {', '.join(marks)}" if marks else "")
            rows.append([f"  {result.size}", str(result.num_micro_batches), *speed, memory])
        table = [line + note for line, note in zip(columns(rows), notes, strict=True)]
        head = f"{self.num_samples} samples per step, {self.device}"
        return "\n".join([head, "", *table, "", counting_text(self.counted), self._advice()])

    def _advice(self) -> str:
        size = f"recommended: micro_batch_size={self.recommended}"
        if not self.num_batch_norms:
            return f"{size}, the smallest within {NEAR_BEST - 1.0:.0%} of the fastest."
        layers = f"{self.num_batch_norms} BatchNorm layer{'s' * (self.num_batch_norms > 1)}"
        which = "the whole batch" if self.recommended == self.num_samples else "the largest that fits"
        gain = self.rates[self.best] / self.rates[self.recommended] - 1.0
        faster = f" micro_batch_size={self.best} is {gain:.0%} faster, but trains differently."
        faster = faster if gain >= _MIN_REPORTED_GAIN else ""
        return (
            f"{size}, {which}: {layers} normalise{'s' * (self.num_batch_norms == 1)} within each micro-batch, so every "
            f"size trains differently (norms='exact' makes splits equal).{faster}"
        )


NUM_ROUNDS = 6
"""Rounds of measurements: the first two run all sizes, later ones only sizes that are close to the fastest."""
_MAX_CANDIDATE_FACTOR = 1.25
"""A size whose step takes more than this many times as long as the shortest step is not run again."""
_MAX_FACTOR = 2.0
"""If a size takes more than this many times as long as the shortest step, smaller sizes are not tried."""
_MAX_TIMED_SECONDS, _MAX_STEPS = 0.2, 20
"""Limits for the timed steps of a size in a round."""


def tune(
    train: TrainSpec,
    data: Iterable[EffectiveBatch],
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    max_seconds: float = 15.0,
    clock: Callable[[], float] = time.perf_counter,
    world: World | None = None,
) -> TuneReport:
    """Measure speed and memory at many micro-batch sizes, with interleaved steps.

    Equivalent to this loop, after a shorter warm-up step of each engine:

    ```python
    for number in range(6):
        for size in all_sizes if number < 2 else sizes_near_the_fastest:
            seconds[size].append(timed(engine_with(size).step, batch))
    ```

    The largest size runs first. If a size takes more than twice the shortest time, smaller sizes are not tried. The
    result is the median over all rounds but the first. The batch is loaded beforehand; the timed step is forwards,
    backwards and the update. Memory is the peak of tensors, with weights, gradients and optimizer state: counted by the
    allocator on CUDA, and in a separate untimed run of two micro-batches on a CPU.

    Args:
        train: a `TrainSpec` with a new model: it is trained for some steps, without scheduler and loss check.
        data: effective batches, such as `ab.batches`; the first one is trained on.
        micro_batch_sizes: sizes to try; None: the batch in 1, 2, 4, ... parts.
        max_seconds: start no round after this many seconds; at least one round is run.
        clock: monotonic time in seconds.
        world: the world of this rank; None: the launcher's.

    Raises:
        BatchSizeError: a size is below 1 or above the batch size, or no size fits into memory.
    """
    world = World.from_environment() if world is None else world
    batch = next(iter(data))
    num_samples = len(batch.sample_ids)
    sizes = _checked(default_sizes(num_samples) if micro_batch_sizes is None else micro_batch_sizes, num_samples)
    # If `norms` is given, the user has chosen what a split does to BatchNorm, so it is not reported.
    modules = [train.model] if isinstance(train.model, torch.nn.Module) else list(train.model.values())
    layers = [layer for module in modules for layer in batch_norms(module).values() if layer.training]
    num_batch_norms = len(layers) if train.norms is None else 0
    train = spec_for_repeated_steps(train)

    def engine(size: int) -> Engine:
        return Engine.from_spec(train, Hardware(micro_batch_size=size, world=world))

    timer = _StepTimer(engine, batch, world.device, clock)
    times = timer.seconds(sizes, max_seconds)
    if not times:
        message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {world.device}. Try smaller ones."
        raise BatchSizeError(message, code="does_not_fit", micro_batch_size=sizes[0])
    # Counting tensors slows a step down, so on a CPU memory is measured in a separate run.
    peaks = timer.peaks or {size: _peak_bytes(modules, engine, batch, size) for size in sorted(times)}
    return TuneReport(
        num_samples=num_samples,
        device=device_name(world.device),
        sizes=tuple(
            SizeResult(
                size=size,
                num_micro_batches=ceil_div(num_samples, size),
                samples_per_second=num_samples / median(times[size][1:] or times[size]) if size in times else None,
                peak_bytes=peaks.get(size),
                fits=size not in timer.too_large,
            )
            for size in sizes
        ),
        num_batch_norms=num_batch_norms,
        counted="allocated" if timer.peaks else "in tensors",
    )


def default_sizes(num_samples: int) -> Sequence[int]:
    """Return sizes of at least 2, in ascending order, that split a step into 1, 2, 4, ... nearly equal parts."""
    sizes = {num_samples}
    parts = 2
    while (size := -(-num_samples // parts)) >= min(2, num_samples) and parts <= num_samples:
        sizes.add(size)
        parts *= 2
    return sorted(sizes)


class _StepTimer:
    """Measures the seconds of steps at several micro-batch sizes."""

    def __init__(
        self, engine: Callable[[int], Engine], batch: EffectiveBatch, device: torch.device, clock: Callable[[], float]
    ) -> None:
        self._engine, self._batch = engine, batch
        self._device, self._clock = device, clock
        self.peaks: dict[int, int] = {}
        self.too_large: set[int] = set()

    def seconds(self, sizes: Sequence[int], max_seconds: float) -> dict[int, list[float]]:
        """Return the step times, one per round, for each size that fits and is not much slower than the fastest."""
        begun = self._clock()
        found: dict[int, list[float]] = {}
        for size in reversed(sizes):
            step_seconds = self._step(size)
            shortest = min((times[0] for times in found.values()), default=math.inf)
            if step_seconds is not None and step_seconds > _MAX_FACTOR * shortest:
                step_seconds = min(step_seconds, self._step(size) or math.inf)  # the machine may have been busy
            if step_seconds is not None:
                found[size] = [step_seconds]
                if step_seconds > _MAX_FACTOR * shortest:
                    break
        order = sorted(found)
        for number in range(1, NUM_ROUNDS):
            if self._clock() - begun > max_seconds or (number > 1 and len(order) == 1):
                break
            for size in order:
                step_seconds = self._step(size)
                if step_seconds is None:  # a size that does not always fit is not recommended
                    del found[size]
                else:
                    found[size].append(step_seconds)
            limit = _MAX_CANDIDATE_FACTOR * min((min(times) for times in found.values()), default=0.0)
            near = (size for size in order if size in found and min(found[size]) <= limit)
            # The order is reversed each time, so that a machine that slows down affects all sizes equally.
            order = sorted(near, reverse=order == sorted(order))
        return found

    def _step(self, size: int) -> float | None:
        """Return the median seconds of a step of a new engine, after a short step; None if memory ran out."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        times: list[float] = []
        try:
            with self._engine(size) as engine:
                # The first step allocates the optimizer's state and warms the caches, so only later steps are timed.
                if self._timed(engine, _two_micro_batches(self._batch, size), size, 1):
                    times = self._timed(engine, self._batch, size, _MAX_STEPS)
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            times = []
        if self._device.type == "cuda":
            self.peaks[size] = max(self.peaks.get(size, 0), torch.cuda.max_memory_allocated(self._device))
        if times:
            return median(times)
        self.too_large.add(size)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _timed(self, engine: Engine, batch: EffectiveBatch, size: int, max_steps: int) -> list[float]:
        """Return the seconds of up to `max_steps` steps, in total about 0.2 s; an empty list if memory ran out."""
        cached, times = CachedBatch(batch), list[float]()
        list(Placement(SplitOptions(micro_batch_size=size), 1, 0).micro_batches(cached))
        # One step of a small model is too short for a reliable time.
        while not times or (len(times) < max_steps and sum(times) < _MAX_TIMED_SECONDS):
            begun = time_after_work(self._device, self._clock)
            too_large = engine.step(cached).too_large
            times.append(time_after_work(self._device, self._clock) - begun)
            if too_large:  # the engine continued with smaller micro-batches
                return []
        return times


def _two_micro_batches(batch: EffectiveBatch, size: int) -> EffectiveBatch:
    """Return a batch with all shapes of micro-batches: a full one, and the last one, which may be smaller."""
    number = len(batch.sample_ids)
    if number <= 2 * size:
        return batch
    rest = number % size or size
    return BatchSubset(batch, [*range(size), *range(number - rest, number)])


def _peak_bytes(
    modules: Sequence[torch.nn.Module], engine: Callable[[int], Engine], batch: EffectiveBatch, size: int
) -> int:
    """Return the peak memory of tensors in a step, in bytes; the optimizer state is allocated before the step."""
    cached = CachedBatch(_two_micro_batches(batch, size))
    # Loaded before the ledger is entered, so that loading is not counted.
    list(Placement(SplitOptions(micro_batch_size=size), 1, 0).micro_batches(cached))
    with MemoryLedger() as ledger:
        for module in modules:
            ledger.categorize("weights", module.parameters())
            ledger.categorize("buffers", module.buffers())
        with engine(size) as sized:
            sized.step(cached)
    ledger.forget()
    return ledger.peak_bytes


def _checked(sizes: Sequence[int], num_samples: int) -> list[int]:
    for size in sizes:
        if not 1 <= size <= num_samples:
            message = (
                f"micro_batch_size={size} must be between 1 and {num_samples}, the number of samples in the batch."
            )
            raise BatchSizeError(
                message, code="size_out_of_range", effective_batch_size=num_samples, micro_batch_size=size
            )
    return sorted(set(sizes))
