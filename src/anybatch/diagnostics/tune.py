"""Speed and memory by micro-batch size: measures steps at many sizes."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import NEAR_BEST, ceil_div, smallest_of_the_fastest
from anybatch.core.splitting import SplitOptions
from anybatch.core.units import columns, in_bytes
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.diagnostics.step_times import (
    MAX_QUEUED,
    Clock,
    Estimate,
    busy_cores,
    estimate,
    queued_seconds,
    time_after_work,
)
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
    longer: Estimate | None = None  # its step time / the step time of the fastest size; None if not measured
    peak_bytes: int | None = None  # of a step; None if not measured
    fits: bool = True  # False if memory ran out


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """Samples per second and memory by micro-batch size. `print(report)` shows the table."""

    num_samples: int  # samples of a step
    device: str  # name of the device that was measured
    sizes: tuple[SizeResult, ...]  # one result for each size, in ascending order
    at_most: float = 1.0  # time of the recommended size / time of any other, at the upper end of the intervals
    queued_share: float = 0.0  # share of the measured time in which steps waited for a core
    num_batch_norms: int = 0  # layers that normalise within each micro-batch, so a split changes the training
    counted: Counted = "in tensors"  # how memory is counted

    @property
    def rates(self) -> dict[int, float]:
        """Samples per second by size, for the measured sizes."""
        return {row.size: row.samples_per_second for row in self.sizes if row.samples_per_second is not None}

    @property
    def best(self) -> int:
        """The fastest size in this measurement."""
        return max(self.rates, key=lambda size: self.rates[size])

    @property
    def recommended(self) -> int | None:
        """The smallest size whose steps take at most 3% longer than the fastest; None if noise hides it.

        If a split changes the training: the whole batch if it fits, else the largest size that fits.
        """
        if self.num_batch_norms:
            return max(self.rates)
        times = {row.size: row.longer.value for row in self.sizes if row.longer is not None}
        return None if self.doubt else smallest_of_the_fastest(times)

    @property
    def doubt(self) -> str:
        """Why the times show no fastest size; empty if they do."""
        if self.at_most <= MAX_UNCLEAR or self.queued_share > MAX_QUEUED:
            return busy_cores(self.queued_share)
        if math.isinf(self.at_most):
            return "there was no time for enough rounds: try fewer sizes"
        return f"the times vary so much that any choice may take {self.at_most - 1.0:.0%} longer than another size"

    def __str__(self) -> str:
        """Return the table and the recommendation."""
        rates, best, recommended = self.rates, None if self.doubt else self.best, self.recommended
        rows, notes = [["  micro-batch", "per step", "samples/s", "time / fastest", self.counted]], [""]
        for result in self.sizes:
            speed = ["-", "not measured" if result.fits else "does not fit"]
            if result.longer is not None:
                speed = [f"{rates[result.size]:,.0f}", str(result.longer)]
            memory = "" if result.peak_bytes is None else in_bytes(result.peak_bytes)
            marks = [word for word, size in (("fastest", best), ("recommended", recommended)) if size == result.size]
            notes.append(f"  <- {', '.join(marks)}" if marks else "")
            rows.append([f"  {result.size}", str(result.num_micro_batches), *speed, memory])
        table = [line + note for line, note in zip(columns(rows), notes, strict=True)]
        head = f"{self.num_samples} samples per step, {self.device}"
        return "\n".join([head, "", *table, "", counting_text(self.counted), self._advice()])

    def _advice(self) -> str:
        size = f"recommended: micro_batch_size={self.recommended}"
        if self.recommended is None:
            return f"no recommendation: {self.doubt}."
        if not self.num_batch_norms:
            return f"{size}, the smallest within {NEAR_BEST - 1.0:.0%} of the fastest."
        layers = f"{self.num_batch_norms} BatchNorm layer{'s' * (self.num_batch_norms > 1)}"
        which = "the whole batch" if self.recommended == self.num_samples else "the largest that fits"
        gain = self.rates[self.best] / self.rates[self.recommended] - 1.0
        faster = f" micro_batch_size={self.best} is {gain:.0%} faster, but trains differently."
        faster = faster if gain >= _MIN_REPORTED_GAIN and not self.doubt else ""
        return (
            f"{size}, {which}: {layers} normalise{'s' * (self.num_batch_norms == 1)} within each micro-batch, so every "
            f"size trains differently (norms='exact' makes splits equal).{faster}"
        )


def longer_than_fastest(
    seconds: Mapping[int, Sequence[float]], finalists: Sequence[int]
) -> tuple[dict[int, Estimate], float]:
    """Return each size's step time as a multiple of the fastest size's, and `TuneReport.at_most`.

    `seconds` has the step times of each size in rounds 0, 1, ..., in all rounds for `finalists`. Round 0 of several
    warms up. Sizes are compared round by round, so that a machine that changes its speed slows down both.
    """
    rounds = {size: times[1:] or times for size, times in seconds.items()}
    best = min(finalists, key=lambda size: median(rounds[size]))

    def compared(size: int, other: int) -> Estimate:
        return estimate([own / others for own, others in zip(rounds[size], rounds[other], strict=False)])

    longer = {size: compared(size, best) for size in rounds}
    longer = {size: replace(found, value=max(1.0, found.value)) for size, found in longer.items()}
    choice = smallest_of_the_fastest({size: found.value for size, found in longer.items()})
    return longer, max((compared(choice, other).high for other in finalists if other != choice), default=1.0)


MAX_UNCLEAR = 1.1
"""Nothing is recommended if another size may be faster by more than this factor."""
MIN_ROUNDS, MAX_ROUNDS = 8, 14
"""Rounds of measurements: the first two run all sizes, later ones only sizes that are close to the fastest."""
_MAX_CANDIDATE_FACTOR = 1.25
"""A size is not run again if in every round its step takes more than this many times as long as the shortest."""
_MAX_FACTOR = 2.0
"""If a size takes more than this many times as long as the shortest step, smaller sizes are not tried."""
_MAX_TIMED_SECONDS, _MAX_STEPS = 0.2, 20
"""Limits for the timed steps of a size in a round."""


def tune(
    train: TrainSpec,
    data: Iterable[EffectiveBatch],
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    max_seconds: float = 30.0,
    clock: Clock = time.perf_counter,
    queued: Clock = queued_seconds,
    world: World | None = None,
) -> TuneReport:
    """Measure speed and memory at many micro-batch sizes, with interleaved steps.

    There are 8 rounds, or up to 14 until the fastest size is clear; from the third on, only sizes near the fastest run.
    The largest size runs first. If a size takes more than twice the shortest time, smaller sizes are not tried. Sizes
    are compared round by round, and the report recommends none if noise hides the fastest. The batch is loaded
    beforehand; the timed step is forwards, backwards and the update. Memory is the peak of tensors, with weights,
    gradients and optimizer state: counted by the allocator on CUDA, and in a separate untimed run of two micro-batches
    on a CPU.

    Args:
        train: a `TrainSpec` with a new model: it is trained for some steps, without scheduler and loss check.
        data: effective batches, such as `ab.batches`; the first one is trained on.
        micro_batch_sizes: sizes to try; None: the batch in 1, 2, 4, ... parts.
        max_seconds: start no round after this many seconds; at least one round is run.
        clock: monotonic time in seconds.
        queued: seconds that this thread has waited for a core so far.
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

    timer = _StepTimer(engine, batch, world.device, clock, queued)
    times = timer.seconds(sizes, max_seconds)
    if not times:
        message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {world.device}. Try smaller ones."
        raise BatchSizeError(message, code="does_not_fit", micro_batch_size=sizes[0])
    # Counting tensors slows a step down, so on a CPU memory is measured in a separate run.
    peaks = timer.peaks or {size: _peak_bytes(modules, engine, batch, size) for size in sorted(times)}
    longer, at_most = longer_than_fastest(times, timer.finalists)
    fastest = num_samples / min(median(times[size][1:] or times[size]) for size in times if longer[size].value == 1.0)
    return TuneReport(
        num_samples=num_samples,
        device=device_name(world.device),
        sizes=tuple(
            SizeResult(
                size=size,
                num_micro_batches=ceil_div(num_samples, size),
                samples_per_second=fastest / longer[size].value if size in times else None,
                longer=longer.get(size),
                peak_bytes=peaks.get(size),
                fits=size not in timer.too_large,
            )
            for size in sizes
        ),
        at_most=at_most,
        queued_share=timer.queued_seconds / max(timer.step_seconds, 1e-9),
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
        self,
        engine: Callable[[int], Engine],
        batch: EffectiveBatch,
        device: torch.device,
        clock: Clock,
        queued: Clock,
    ) -> None:
        self._engine, self._batch = engine, batch
        self._device, self._clock, self._queued = device, clock, queued
        self.step_seconds = self.queued_seconds = 0.0
        self.peaks: dict[int, int] = {}
        self.too_large: set[int] = set()
        self.finalists: list[int] = []

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
        for number in range(1, MAX_ROUNDS):
            if self._clock() - begun > max_seconds or (number > 1 and len(order) <= 1):
                break
            if number >= MIN_ROUNDS and longer_than_fastest(found, order)[1] <= MAX_UNCLEAR:
                break
            for size in order:
                step_seconds = self._step(size)
                if step_seconds is None:  # a size that does not always fit is not recommended
                    del found[size]
                else:
                    found[size].append(step_seconds)
            kept = {size: found[size] for size in order if size in found}
            round_bests = [min(times) for times in zip(*kept.values(), strict=True)]
            # The order is reversed each time, so that a machine that slows down affects all sizes equally.
            order = sorted((each for each in kept if _near(kept[each], round_bests)), reverse=order == sorted(order))
        self.finalists = order
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
            begun, waited = time_after_work(self._device, self._clock), self._queued()
            too_large = engine.step(cached).too_large
            times.append(time_after_work(self._device, self._clock) - begun)
            self.step_seconds += times[-1]
            self.queued_seconds += self._queued() - waited
            if too_large:  # the engine continued with smaller micro-batches
                return []
        return times


def _near(times: Sequence[float], shortest: Sequence[float]) -> bool:
    """Return whether a size was close to the fastest one in at least one round."""
    return any(mine <= _MAX_CANDIDATE_FACTOR * best for mine, best in zip(times, shortest, strict=True))


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
            message = f"micro_batch_size={size} must be between 1 and {num_samples}, the samples in the batch."
            given = {"effective_batch_size": num_samples, "micro_batch_size": size}
            raise BatchSizeError(message, code="size_out_of_range", **given)
    return sorted(set(sizes))
