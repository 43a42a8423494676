"""How does speed, and memory, depend on the micro-batch size? Makes whole steps at many sizes and loads data."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from anybatch.core.batch import EffectiveBatch, Foresight, Placement, Position, Positions
from anybatch.core.geometry import ceil_div
from anybatch.core.loss import Loss, LossFunction
from anybatch.core.splitting import Cut
from anybatch.core.tree import Batch
from anybatch.diagnostics.tuning import LoadingResult, SizeResult, TuneReport, default_sizes
from anybatch.engine.engine import Engine
from anybatch.engine.inputs import Model
from anybatch.engine.rng.generators import Rng
from anybatch.engine.update.precision import OptimizerFunction, PrecisionName
from anybatch.errors import BatchSizeError, MemoryExhaustedError
from anybatch.memory.host_memory import device_name
from anybatch.memory.ledger import MemoryLedger
from anybatch.norms import Policy, PolicyName
from anybatch.parallel.world import World

NUM_ROUNDS = 3
LOADED_STEPS = 4
"""Effective batches that are loaded for each number of workers, after a first one."""


def tune(
    model: Callable[[], Model],
    optimizer: OptimizerFunction,
    loss: Loss | LossFunction,
    data: Callable[[int], Iterable[EffectiveBatch]],
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] = (),
    precision: PrecisionName = "fp32",
    norms: Policy | PolicyName = "keep",
    rng: Rng = "micro_batch",
    most_seconds: float = 60.0,
    clock: Callable[[], float] = time.perf_counter,
    world: World | None = None,
) -> TuneReport:
    """Measure whole steps at many micro-batch sizes, in turns, and how fast data is loaded.

    The plain loop, in which each step is run once to warm up and once to be timed:

    ```python
    for _ in range(3):
        for size in micro_batch_sizes:
            seconds[size] = min(seconds[size], timed(engine_with(size).step, batch))
    ```

    The batch is loaded beforehand, so a step is forwards, backwards and update. Memory is the most that tensors held,
    weights, gradients and optimizer state included: on CUDA as the allocator counts it, on a CPU in a run of its own
    that is not timed.

    Args:
        model: function () -> model; what it returns is trained for some steps and thrown away.
        optimizer: function named_parameters -> optimizer.
        loss: as the engine takes it.
        data: function num_workers -> effective batches, such as `ab.batches`; the first one is trained on.
        micro_batch_sizes: sizes to try; None cuts the batch into 1, 2, 4, ... parts.
        num_workers: numbers of loading processes to try; empty does not look at loading.
        precision: as the engine takes it; so are `norms` and `rng`.
        norms: what to do about BatchNorm.
        rng: what random numbers belong to.
        most_seconds: no further round is begun after so long; there is one in any case.
        clock: seconds that only go forward.
        world: the one rank that is measured; None asks the environment.

    Raises:
        BatchSizeError: a size is below 1 or above the batch's, or not even the smallest one fits.
    """
    world = World.from_environment() if world is None else world
    batch = next(iter(data(0)))
    num_samples = len(batch.sample_ids)
    sizes = _checked(default_sizes(num_samples) if micro_batch_sizes is None else micro_batch_sizes, num_samples)
    trained = model()

    def engine(size: int) -> Engine:
        return Engine(
            trained,
            optimizer,
            loss,
            micro_batch_size=size,
            precision=precision,
            norms=norms,
            rng=rng,
            check_loss=False,
            world=world,
        )

    steps = _Steps(engine, batch, world.device, clock)
    seconds = steps.seconds(sizes, most_seconds)
    if not seconds:
        message = f"micro-batches of {sizes[0]} samples do not fit into the memory of {world.device}. Try smaller ones."
        raise BatchSizeError(message)
    peaks = steps.peaks or {size: _peak_bytes(trained, engine, batch, size) for size in seconds}
    report = TuneReport(
        num_samples=num_samples,
        device=device_name(world.device),
        sizes=tuple(
            SizeResult(
                size=size,
                num_micro_batches=ceil_div(num_samples, size),
                samples_per_second=num_samples / seconds[size] if size in seconds else None,
                peak_bytes=peaks.get(size),
            )
            for size in sizes
        ),
    )
    return dataclasses.replace(report, loading=_loading(data, num_workers, report.recommended, clock))


class _Held:
    """An effective batch whose micro-batches are kept on the host once they were loaded."""

    def __init__(self, batch: EffectiveBatch) -> None:
        self._batch = batch
        self._loaded: tuple[Sequence[Positions], list[Batch]] | None = None
        self.sample_ids: Sequence[int] = batch.sample_ids
        self.seed: int = batch.seed
        self.end: Position = batch.end

    def feed(self, units: Sequence[Positions], foresight: Foresight | None = None) -> Iterator[Batch]:
        """Yield the micro-batches of a cut, loaded once as long as the cut stays."""
        if self._loaded is None or self._loaded[0] != units:
            self._loaded = units, list(self._batch.feed(units, foresight))
        yield from self._loaded[1]


class _Steps:
    """Makes steps at one size after the other, and takes the time."""

    def __init__(
        self,
        engine: Callable[[int], Engine],
        batch: EffectiveBatch,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._batch = _Held(batch)
        self._device = device
        self._clock = clock
        self.peaks: dict[int, int] = {}

    def seconds(self, sizes: Sequence[int], most_seconds: float) -> dict[int, float]:
        """Return the shortest time of a step for each size that fits; sizes take turns."""
        found: dict[int, float] = {}
        begun = self._clock()
        for number in range(NUM_ROUNDS):
            for size in sizes if number == 0 else list(found):
                taken = self._step(size)
                if taken is None:
                    found.pop(size, None)
                    break  # what is larger does not fit either
                found[size] = min(taken, found.get(size, math.inf))
            if self._clock() - begun > most_seconds:
                break
        return found

    def _step(self, size: int) -> float | None:
        """Return the seconds of one step after another one; None if memory ran out."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            with self._engine(size) as engine:
                too_large = engine.step(self._batch).too_large  # the engine went on with a smaller size
                begun = self._now()
                too_large += engine.step(self._batch).too_large
                taken = None if too_large else self._now() - begun
        except (torch.OutOfMemoryError, MemoryExhaustedError):
            taken = None
        if self._device.type == "cuda":
            self.peaks[size] = torch.cuda.max_memory_allocated(self._device)
            if taken is None:
                torch.cuda.empty_cache()
        return taken

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return self._clock()


def _peak_bytes(trained: Model, engine: Callable[[int], Engine], batch: EffectiveBatch, size: int) -> int:
    """Return the most that tensors hold in the second step, as a ledger has it."""
    modules = [trained] if isinstance(trained, torch.nn.Module) else list(trained.values())
    held = _Held(batch)
    list(Placement(Cut(micro_batch_size=size), 1, 0).micro_batches(held))
    with MemoryLedger() as ledger:
        for module in modules:
            ledger.hold("weights", module.parameters())
            ledger.hold("buffers", module.buffers())
        with engine(size) as made:
            made.step(held)
            made.step(held)
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
            if number == 0:
                begun = clock()
                continue
            num_samples += len(batch.sample_ids)
            if number == LOADED_STEPS:
                break
    finally:
        run.close()
    return num_samples / max(clock() - begun, 1e-9)


def _checked(sizes: Sequence[int], num_samples: int) -> list[int]:
    for size in sizes:
        if not 1 <= size <= num_samples:
            message = f"micro_batch_size={size} must be from 1 to the {num_samples} samples of the batch."
            raise BatchSizeError(message)
    return sorted(set(sizes))
