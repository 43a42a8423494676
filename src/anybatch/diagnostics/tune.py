"""How does speed, and memory, depend on the micro-batch size? Makes whole steps at many sizes and loads data."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, TypeVar

import torch

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.geometry import ceil_div
from anybatch.core.splitting import Cut
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps
from anybatch.diagnostics.tune_report import LoadingResult, SizeResult, TuneReport
from anybatch.engine.engine import Engine
from anybatch.engine.inputs import Model
from anybatch.engine.spec import Hardware, TrainSpec
from anybatch.errors import BatchSizeError, MemoryExhaustedError
from anybatch.memory.host_memory import device_name
from anybatch.memory.ledger import MemoryLedger
from anybatch.norms.layers import batch_norms
from anybatch.parallel.world import World

Measured = TypeVar("Measured")
NUM_ROUNDS = 6
"""Of them the first tries all sizes, and the others those that may be the fastest."""
_MOST_OF_A_CANDIDATE = 1.25
"""Times the shortest step of two rounds: what takes longer is not measured again."""
_TIMED_SECONDS, _MOST_STEPS = 0.2, 20
"""Of a size in a turn: steps are made for so long, or so many."""
_STEPS_OF_A_SUBSET = 3
_MOST_TIMES_SHORTEST = 2.0
"""Times the shortest step that is estimated: what would take longer is not measured at all."""
LOADED_STEPS = 4
"""Effective batches that are loaded for each number of workers, after a first one."""


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
    """Measure whole steps at many micro-batch sizes, in turns, and how fast data is loaded.

    The plain loop, in which each engine has made a shorter step before, to warm up:

    ```python
    for turn in range(6):
        for size in all_sizes if turn == 0 else those_near_the_fastest:
            seconds[size].append(timed(engine_with(size).step, batch))
    ```

    Sizes that take more than twice as long as another by a step of one and of two micro-batches are not run whole.
    What counts is the median of a size's times relative to the fastest size's in the same turn, so that a machine that
    is busy now and then does not decide. The batch is loaded beforehand, so a step is forwards, backwards and update.
    Memory is the most that tensors took, weights, gradients and optimizer state included: on CUDA as the allocator
    counts it, on a CPU in a run of its own, of two micro-batches, that is not timed.

    Args:
        train: what is trained; its model is trained for some steps, so it should be a new one. The scheduler is left
            out, since it would come to its end, and so is the check of the loss.
        data: function num_workers -> effective batches, such as `ab.batches`; the first one is trained on.
        micro_batch_sizes: sizes to try; None cuts the batch into 1, 2, 4, ... parts.
        num_workers: numbers of loading processes to try; empty does not look at loading.
        most_seconds: no further round is begun after so long; there is one in any case.
        clock: monotonic time in seconds.
        world: the one rank that is measured; None asks the environment.

    Raises:
        BatchSizeError: a size is below 1 or above the batch's, or not even the smallest one fits.
    """
    world = World.from_environment() if world is None else world
    batch = next(iter(data(0)))
    num_samples = len(batch.sample_ids)
    sizes = _checked(default_sizes(num_samples) if micro_batch_sizes is None else micro_batch_sizes, num_samples)
    # How many layers make a cut batch another training; 0 under a policy that was chosen, also to keep them.
    num_batch_norms = len(_cut_batch_norms(train)) if train.norms is None else 0
    train = spec_for_repeated_steps(train)

    def engine(size: int) -> Engine:
        return Engine.from_spec(train, Hardware(micro_batch_size=size, world=world))

    timer = _StepTimer(engine, batch, world.device, clock)
    times = timer.seconds(sizes, most_seconds)
    if not times:
        message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {world.device}. Try smaller ones."
        raise BatchSizeError(message, micro_batch_size=sizes[0])
    # Counting tensors slows a step down, so on a CPU memory is measured in a run of its own.
    peaks = timer.peaks or {size: _peak_bytes(train.model, engine, batch, size) for size in times}
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
    return dataclasses.replace(report, loading=_loading(data, num_workers, report.recommended, clock))


def default_sizes(num_samples: int) -> Sequence[int]:
    """Return sizes that cut a step into 1, 2, 4, ... nearly equal parts, rising, from 2 samples on."""
    sizes = {num_samples}
    parts = 2
    while (size := -(-num_samples // parts)) >= min(2, num_samples) and parts <= num_samples:
        sizes.add(size)
        parts *= 2
    return sorted(sizes)


class _StepTimer:
    """Makes steps at one size after the other, and takes the time."""

    def __init__(
        self, engine: Callable[[int], Engine], batch: EffectiveBatch, device: torch.device, clock: Callable[[], float]
    ) -> None:
        self._engine, self._whole = engine, batch
        self._device, self._clock = device, clock
        self.peaks: dict[int, int] = {}
        self.estimated: set[int] = set()

    def seconds(self, sizes: Sequence[int], most_seconds: float) -> dict[int, list[float]]:
        """Return the times of steps, turn by turn, for each size that fits; sizes take turns."""
        begun = self._clock()
        estimates = self._estimates(sizes)
        # Left out is what is slow at the least, measured by what is fast at the most: whatever disturbs one estimate.
        limit = _MOST_TIMES_SHORTEST * min((most for _, most in estimates.values()), default=0.0)
        self.estimated = {size for size, (least, _) in estimates.items() if least > limit}
        found: dict[int, list[float]] = {size: [estimates[size][0]] for size in self.estimated}
        turn: Sequence[int] = [size for size in estimates if size not in self.estimated]
        for number in range(NUM_ROUNDS):
            for size in turn:
                taken = self._with_engine(size, partial(self._step, size))
                if taken is None:
                    # A size that does not fit in every round is not one to recommend, nor is a larger one.
                    found = {one: times for one, times in found.items() if one < size}
                    break
                found.setdefault(size, []).append(taken)
            if not found or self._clock() - begun > most_seconds:
                break
            # A size is left out by its shortest step, after two turns: the machine may have been busy in one of them.
            limit = _MOST_OF_A_CANDIDATE * min(max(times) for times in found.values())
            near = (one for one in found.keys() - self.estimated if not number or min(found[one]) <= limit)
            # The other way round each time, so that a machine that slows down slows all of them alike.
            turn = sorted(near, reverse=list(turn) == sorted(turn))
            if len(turn) == 1:
                break
        return found

    def _estimates(self, sizes: Sequence[int]) -> dict[int, tuple[float, float]]:
        """Return the least and the most that a step may take, for each size that fits.

        From steps of one micro-batch and of two: each further one takes what the second did, or, at the most, half of
        a step of two with its update.
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
        """Return the seconds of a step of one micro-batch, and of one of two; both are the whole one where it is it."""
        batch = _two_micro_batches(self._whole, size)
        twos = self._timed(engine, batch, size, 1)
        # A long step is hardly longer for making the optimizer's state; a short one is made again.
        if twos and twos[0] < _TIMED_SECONDS:
            twos = self._timed(engine, batch, size, _STEPS_OF_A_SUBSET)
        ones = twos
        if twos and len(self._whole.sample_ids) > 2 * size:
            ones = self._timed(engine, BatchSubset(self._whole, range(size)), size, _STEPS_OF_A_SUBSET)
        # What else the machine does only adds to a time, and few are taken.
        return (min(ones), min(twos)) if ones and twos else None

    def _step(self, size: int, engine: Engine) -> float | None:
        """Return the seconds of a step of the whole batch, after a short one; None if memory ran out."""
        # The first step makes the optimizer's state and warms the caches; only the second one is timed.
        if not self._timed(engine, _two_micro_batches(self._whole, size), size, 1):
            return None
        times = self._timed(engine, self._whole, size, _MOST_STEPS)
        return median(times) if times else None

    def _timed(self, engine: Engine, batch: EffectiveBatch, size: int, most: int) -> list[float]:
        """Return the seconds of steps, of at most so many and a fifth of a second; none if memory ran out."""
        cached, times = CachedBatch(batch), list[float]()
        list(Placement(Cut(micro_batch_size=size), 1, 0).micro_batches(cached))
        # A step of a small model is over before the machine does anything else.
        while not times or (len(times) < most and sum(times) < _TIMED_SECONDS):
            begun = self._now()
            too_large = engine.step(cached).too_large
            times.append(self._now() - begun)
            if too_large:  # it went on with a smaller one
                return []
        return times

    def _with_engine(self, size: int, measure: Callable[[Engine], Measured | None]) -> Measured | None:
        """Return what is measured with a new engine of that size; None if memory ran out."""
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
        # Kernels run behind the host: without waiting, a step would seem to end when it has only been launched.
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
    """Return each size's times relative to those of the fastest one in the same turns; the first turn warms up."""
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


def _cut_batch_norms(train: TrainSpec) -> Sequence[torch.nn.Module]:
    """Return the layers that normalise by the statistics of the micro-batch."""
    modules = [train.model] if isinstance(train.model, torch.nn.Module) else list(train.model.values())
    return [layer for module in modules for layer in batch_norms(module).values() if layer.training]


def _peak_bytes(trained: Model, engine: Callable[[int], Engine], batch: EffectiveBatch, size: int) -> int:
    """Return the most that tensors take in a step, as a ledger counts it; optimizer state is made before it."""
    modules = [trained] if isinstance(trained, torch.nn.Module) else list(trained.values())
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


def _loading(
    data: Callable[[int], Iterable[EffectiveBatch]],
    num_workers: Sequence[int],
    micro_batch_size: int,
    clock: Callable[[], float],
) -> tuple[LoadingResult, ...]:
    """Return how fast each number of workers loads micro-batches of that size."""
    cut = Cut(micro_batch_size=micro_batch_size)
    return tuple(
        LoadingResult(num_workers=number, samples_per_second=_loaded_per_second(data(number), cut, clock))
        for number in sorted(set(num_workers))
    )


def _loaded_per_second(data: Iterable[EffectiveBatch], cut: Cut, clock: Callable[[], float]) -> float:
    """Return how many samples per second arrive, once the first batch has."""
    begun, num_samples = clock(), 0
    run: Any = iter(data)
    try:
        for number, batch in enumerate(run):
            for _ in Placement(cut, 1, 0).micro_batches(batch):
                pass
            # Starting the workers is in the time of the first batch, and is not what is measured.
            if number == 0:
                begun = clock()
                continue
            num_samples += len(batch.sample_ids)
            if number == LOADED_STEPS:
                break
    finally:
        # Ends the loader's workers now; they would disturb the next measurement.
        run.close()
    # A coarse clock may not have moved.
    return num_samples / max(clock() - begun, 1e-9)


def _checked(sizes: Sequence[int], num_samples: int) -> list[int]:
    for size in sizes:
        if not 1 <= size <= num_samples:
            message = f"micro_batch_size={size} must be from 1 to the {num_samples} samples of the batch."
            raise BatchSizeError(message, effective_batch_size=num_samples, micro_batch_size=size)
    return sorted(set(sizes))
