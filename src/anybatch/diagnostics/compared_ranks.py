"""Measurements of `compare` on one rank: memory and gradients of each training setup, then step times, interleaved."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from anybatch.core.batch import EffectiveBatch, Placement
from anybatch.core.loss import declared
from anybatch.core.splitting import SplitOptions
from anybatch.core.tensors import Gradients, relative_error
from anybatch.diagnostics.compared_setups import TrainingSetup
from anybatch.diagnostics.gradient_runs import copied_runs
from anybatch.diagnostics.memory_report import record_memory
from anybatch.diagnostics.repeated_steps import BatchSubset, CachedBatch, spec_for_repeated_steps, without_reduction
from anybatch.diagnostics.step_times import PhaseClock, queued_seconds, time_after_work
from anybatch.engine.arguments import Hardware, TrainSpec
from anybatch.engine.engine import Engine
from anybatch.engine.user_code import collect_modules
from anybatch.errors import AnyBatchError, MemoryExhaustedError
from anybatch.memory.device_memory import begin_peak, driver_bytes, memory_in_use
from anybatch.parallel.ddp import DDP
from anybatch.parallel.dtensors import gather
from anybatch.parallel.strategy import Turn, trainable
from anybatch.parallel.world import World

_WARM_STEPS, _TIMED_STEPS, _MAX_SECONDS = 1, 3, 0.3
"""Steps of a setup in each round; no further step starts after `_MAX_SECONDS`, so that there are more rounds."""


@dataclass(slots=True, kw_only=True)
class RankFigures:
    """The measurements of one setup on one rank."""

    step_seconds: list[list[float]] = field(default_factory=list)  # in each round
    unreduced_seconds: list[list[float]] = field(default_factory=list)  # without reduction, on all ranks simultaneously
    all_seconds: float = 0.0  # of all steps that were timed
    queued_seconds: float = 0.0  # waiting for a core in these steps
    peak_bytes: int = 0  # of the allocator on CUDA, else of this rank's tensors
    total_peak_bytes: int = 0  # over all devices of this rank
    reserved_bytes: int | None = None  # None on a CPU
    driver_bytes: int | None = None  # None on a CPU
    gradient_bytes: int = 0  # passed to collectives per step
    gradient_error: float | None = None  # relative to plain PyTorch; None except on rank 0
    reason: str = ""  # why it failed; empty on success


class ReduceEveryMicroBatch(DDP):
    """DDP without `no_sync`: reduces gradients after every micro-batch, to measure what that costs."""

    def micro_batch(self, turn: Turn) -> AbstractContextManager[object]:
        """Return a context in which gradients are reduced."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                # .grad is already a sum over ranks, and DDP sums it over ranks again.
                parameter.grad /= self._world.size
        return super().micro_batch(replace(turn, last=True))


def measure_on_rank(
    train: Callable[[], TrainSpec],
    data: Callable[[], Iterable[EffectiveBatch]],
    setups: Sequence[TrainingSetup],
    *,
    device_type: str,
    num_rounds: int,
    max_seconds: float,
    on_progress: Callable[[str], None] | None,
) -> dict[str, RankFigures]:
    """Measure every setup on this rank, together with the other ranks; return the figures by name of the setup."""
    device = torch.device("cuda", torch.distributed.get_rank()) if device_type == "cuda" else device_type
    with World.from_environment(device=device) as world:
        measurement = _SetupMeasurement(world, train, data, on_progress if world.rank == 0 else None)
        return measurement.run(setups, num_rounds, max_seconds)


_Measure = Callable[[TrainingSetup, RankFigures], None]


class _SetupMeasurement:
    """Measures all setups on one rank."""

    def __init__(
        self,
        world: World,
        train: Callable[[], TrainSpec],
        data: Callable[[], Iterable[EffectiveBatch]],
        on_progress: Callable[[str], None] | None,
    ) -> None:
        self._train, self._report = train, on_progress or (lambda _: None)
        self._world = world
        self._alone = World(device=world.device)
        self._whole = CachedBatch(next(iter(data())))
        self._random_modules: Sequence[str] = ()
        self._native: Gradients = {}
        self._gradient_bytes = 0

    def run(self, all_setups: Sequence[TrainingSetup], num_rounds: int, max_seconds: float) -> dict[str, RankFigures]:
        """Return the figures of every setup; if a setup failed, its figures contain the reason."""
        figures = {setup.name: RankFigures(reason=setup.unmeasured) for setup in all_setups}
        setups = [setup for setup in all_setups if not setup.unmeasured]
        self._report("the unsplit batch")
        self._run_native_batch()
        for number, setup in enumerate(setups):
            self._report(f"memory and gradient of {setup.name}, {number + 1} of {len(setups)} setups")
            self._try(setup, figures[setup.name], self._measure_once)
        begun = time.perf_counter()
        for number in range(num_rounds):
            left = max(0.0, max_seconds - (time.perf_counter() - begun))
            for setup in setups:
                self._report(f"steps of {setup.name}, round {number + 1}; last round begins within {math.ceil(left)} s")
                # Setups are interleaved, so that a machine that slows down affects all of them.
                if not figures[setup.name].reason:
                    self._try(setup, figures[setup.name], self._measure_time)
            # Rank 0 decides, because clocks differ.
            if self._world.gather_numbers([time.perf_counter() - begun])[0][0] > max_seconds:
                break
        return figures

    def _try(self, setup: TrainingSetup, figures: RankFigures, measure: _Measure) -> None:
        """Measure a setup on its ranks while other ranks wait. A failure on one rank skips the setup on all."""
        if self._world.rank < setup.num_ranks:
            try:
                measure(setup, figures)
            except (torch.OutOfMemoryError, MemoryExhaustedError):
                figures.reason = "it does not fit into memory"
            except (AnyBatchError, RuntimeError, TypeError, ValueError, AttributeError) as error:
                figures.reason = str(error).strip().splitlines()[0] or type(error).__name__
        reasons = [reason for reason in self._world.gather_objects(figures.reason) if reason]
        figures.reason = reasons[0] if reasons else ""

    def _run_native_batch(self) -> None:
        """Compute the gradient of the unsplit batch in plain PyTorch, and find the modules that draw random numbers."""
        found: Sequence[str] = ()
        train = self._train()
        modules = collect_modules(train.model, declared(train.loss))
        self._gradient_bytes = sum(p.numel() * p.itemsize for p in trainable(modules).values())
        if self._world.rank == 0:
            batch = next(Placement(SplitOptions(), 1, 0).micro_batches(self._whole))
            runs = copied_runs(train.model, declared(train.loss), batch, None, seed=0, norms=train.norms)
            found = runs.forward_traits().random_modules
            runs.in_evaluation = {module for name, module in runs.modules.named_modules() if name in found}
            self._native = runs.unsplit_gradient()
        self._random_modules = self._world.gather_objects(tuple(found))[0]

    def _measure_once(self, setup: TrainingSetup, figures: RankFigures) -> None:
        """Measure memory, bytes sent and gradients; unlike times, one measurement suffices."""
        self._measure_memory(setup, figures)
        clock = PhaseClock(self._world.device, waits=False)
        with self._engine(setup, observer=clock) as engine:
            batch = self._batch(setup)
            engine.step(batch)
            figures.gradient_bytes = clock.timed(lambda: engine.step(batch)).message_bytes
        with self._engine(setup, without_randomness=True) as engine:
            found = {name: g if g is None else gather(g) for name, g in engine.gradients(self._batch(setup)).items()}
        if self._world.rank == 0 and setup.num_samples == len(self._whole.sample_ids):
            figures.gradient_error = relative_error(found, self._native)

    def _measure_time(self, setup: TrainingSetup, figures: RankFigures) -> None:
        """Time some steps, each after a barrier, and as many steps without reduction."""
        figures.step_seconds.append(self._seconds(setup, self._engine(setup), figures))
        if setup.num_ranks > 1:
            hardware = without_reduction(setup.micro_batch_size, self._world)
            figures.unreduced_seconds.append(
                self._seconds(setup, Engine.from_spec(self._new_spec(), hardware), figures)
            )

    def _seconds(self, setup: TrainingSetup, engine: Engine, figures: RankFigures) -> list[float]:
        """Return the seconds of each timed step, after a warm-up step."""
        found, batch = list[float](), self._batch(setup)
        with engine:
            for _ in range(_WARM_STEPS + _TIMED_STEPS):
                spent = sum(found[_WARM_STEPS:])
                if setup.num_ranks > 1:  # ranks agree, because clocks differ
                    spent = self._world.gather_numbers([spent])[0][0]
                if spent > _MAX_SECONDS:
                    break
                begun, waited = time_after_work(self._world.device), queued_seconds()
                engine.step(batch)
                found.append(time_after_work(self._world.device) - begun)
                figures.all_seconds += found[-1]
                figures.queued_seconds += queued_seconds() - waited
        return found[_WARM_STEPS:]

    def _engine(self, setup: TrainingSetup, *, without_randomness: bool = False, observer: Any = None) -> Engine:  # noqa: ANN401 (an observer, or None)
        """Return a new engine for a setup; `without_randomness` puts random modules into evaluation mode."""
        train = self._new_spec(without_randomness=without_randomness)
        world = self._world if setup.num_ranks > 1 else self._alone
        strategy = setup.strategy or ReduceEveryMicroBatch()
        hardware = Hardware(micro_batch_size=setup.micro_batch_size, strategy=strategy, world=world)
        return Engine.from_spec(train, hardware, observer=observer)

    def _new_spec(self, *, without_randomness: bool = False) -> TrainSpec:
        spec = self._train()
        modules = spec.model if isinstance(spec.model, nn.Module) else nn.ModuleDict(cast("Any", spec.model))
        for name, module in modules.named_modules() if without_randomness else ():
            if name in self._random_modules:
                module.training = False
        modules.to(self._world.device)
        return spec_for_repeated_steps(spec)

    def _batch(self, setup: TrainingSetup) -> EffectiveBatch:
        """Return the samples of one update."""
        if setup.num_samples >= len(self._whole.sample_ids):
            return self._whole
        return CachedBatch(BatchSubset(self._whole, range(setup.num_samples)))

    def _measure_memory(self, setup: TrainingSetup, figures: RankFigures) -> None:
        for device in self._devices():
            begin_peak(device)
        with self._engine(setup) as engine:
            batch = self._batch(setup)
            engine.step(batch)
            with record_memory(engine) as recording:
                engine.step(batch)
            # DDP allocates its buckets in C++, which the recording does not cover.
            buckets = self._gradient_bytes if setup.strategy in ("ddp", None) else 0
            tensor_bytes = recording.report.timeline.peak_bytes + buckets
            used = [memory for memory in map(memory_in_use, self._devices()) if memory is not None]
            figures.peak_bytes = max((memory.peak_bytes for memory in used), default=tensor_bytes)
            figures.total_peak_bytes = sum(memory.peak_bytes for memory in used) if used else tensor_bytes
            figures.reserved_bytes = max((memory.reserved_bytes or 0 for memory in used), default=None)
            figures.driver_bytes = driver_bytes(self._world.device)

    def _devices(self) -> list[torch.device]:
        """Return all CUDA devices; none on a CPU."""
        if self._world.device.type != "cuda":
            return []
        # `DataParallel` uses all devices from one process, while the other ranks wait.
        return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
